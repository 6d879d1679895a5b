//! Large bodies, on their way from the table to their runs.

use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tower_dedup_inbox::Inbox;

use crate::world::{Place, SHORT, World, one, request, send, stored};
use support::proxy::through;

/// Returns the port of a proxy that passes 8 MB of replies a second.
async fn slow_replies(server: u16) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let server = TcpStream::connect(("127.0.0.1", server)).await.unwrap();
            let ((mut asks, mut hears), (mut replies, mut told)) =
                (client.into_split(), server.into_split());
            tokio::spawn(async move { tokio::io::copy(&mut asks, &mut told).await });
            tokio::spawn(async move {
                let mut part = vec![0; 80_000];
                while let Ok(length @ 1..) = replies.read(&mut part).await {
                    hears.write_all(&part[..length]).await?;
                    let length = u32::try_from(length).expect("a small number");
                    tokio::time::sleep(Duration::from_nanos(125) * length).await;
                }
                std::io::Result::Ok(())
            });
        }
    });
    port
}

/// The reply to a take of all rows would take longer than the call may: a few large ones, or many.
#[tokio::test]
async fn large_bodies_are_taken_a_few_at_a_time() {
    for (bytes, rows) in [(5_000_000, 8), (250_000, 100)] {
        let mut world = World::new(Place::Postgres).await;
        world.plan(vec![500; 2 * rows]);
        let direct: PgConnectOptions = world.url.parse().unwrap();
        let port = slow_replies(direct.get_port()).await;
        let pool = PgPoolOptions::new().connect_lazy_with(through(port, direct));
        let inbox = Inbox::postgres(pool, "shop").delays([SHORT; 3]).slots(rows);
        world.inbox = inbox.turn(Duration::from_secs(4));
        let app = world.router_of(world.dedup(one()).body_limit(bytes));
        let body = "x".repeat(bytes);
        // On a busy machine, a delivery may go without a row: the table has a bound of 1 s for it.
        let mut sent = 0;
        while world.rows().await.len() < rows {
            assert!(sent < 2 * rows, "{:?}", world.rows().await);
            if send(&app, request(&sent.to_string(), &body)).await != stored() {
                tokio::time::sleep(Duration::from_secs(5)).await;
            }
            sent += 1;
        }
        world.app.plan.lock().unwrap().clear();
        tokio::time::sleep(2 * SHORT).await;
        let running = world.start(app);
        support::until(|| world.runs().len() >= sent + rows).await;
        while let rows = world.rows().await
            && !rows.is_empty()
        {
            // A delivery that gave up on its row may have left one, which lapses once.
            assert!(rows.iter().all(|row| row.deaths <= 1 && row.parked.is_none()), "{rows:#?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert!(world.effects().await.len() >= rows);
        drop(running);
    }
}
