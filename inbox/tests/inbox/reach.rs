//! What a redelivery meets on its way from the table to its layer.

use std::convert::Infallible;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::body::Body;
use http::{Request, Response};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tower_dedup_inbox::{Inbox, Parked};

use crate::world::{Place, SHORT, World, on_each, one, request, send, stored};
use support::proxy::through;

on_each! {
    handler_without_the_inbox_is_awaited_and_not_polled_without_end
}

async fn handler_without_the_inbox_is_awaited_and_not_polled_without_end(place: Place) {
    let world = World::new(place).await;
    world.plan([500]);
    assert_eq!(send(&world.router(), request("a", "1")).await, stored());
    let polls = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&polls);
    let without = tower::service_fn(move |request: Request<http_body_util::Full<bytes::Bytes>>| {
        // With its mark.
        drop(request);
        let polls = Arc::clone(&counted);
        async move {
            let mut handler = pin!(tokio::time::sleep(Duration::from_millis(500)));
            std::future::poll_fn(|cx| {
                polls.fetch_add(1, Ordering::Relaxed);
                handler.as_mut().poll(cx)
            })
            .await;
            Ok::<_, Infallible>(Response::new(Body::empty()))
        }
    });
    let running = world.start(without);
    assert_eq!(world.until_parked().await, [Parked::Misrouted]);
    let polls = polls.load(Ordering::Relaxed);
    assert!(polls < 100, "{polls} polls of a handler that sleeps once");
    drop(running);
}

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

/// The reply to a take of all rows would take longer than the call may.
#[tokio::test]
async fn large_bodies_are_taken_a_few_at_a_time() {
    const ROWS: usize = 8;
    let mut world = World::new(Place::Postgres).await;
    world.plan([500; 100]);
    let direct: PgConnectOptions = world.url.parse().unwrap();
    let port = slow_replies(direct.get_port()).await;
    let pool = PgPoolOptions::new().connect_lazy_with(through(port, direct));
    world.inbox = Inbox::postgres(pool, "shop").delays([SHORT; 3]).turn(Duration::from_secs(2));
    let app = world.router_of(world.dedup(one()).body_limit(3_000_000));
    let body = "x".repeat(3_000_000);
    // On a busy machine, a delivery may go without a row: the table has a bound of 1 s for it.
    let mut sent = 0;
    while world.rows().await.len() < ROWS {
        assert!(sent < 50, "{:?}", world.rows().await);
        if send(&app, request(&sent.to_string(), &body)).await != stored() {
            tokio::time::sleep(Duration::from_secs(5)).await;
        }
        sent += 1;
    }
    world.app.plan.lock().unwrap().clear();
    tokio::time::sleep(2 * SHORT).await;
    let running = world.start(app);
    support::until(|| world.runs().len() >= sent + ROWS).await;
    while let rows = world.rows().await
        && !rows.is_empty()
    {
        // A delivery that gave up on its row may have left one, which lapses once.
        assert!(rows.iter().all(|row| row.deaths <= 1 && row.parked.is_none()), "{rows:#?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(world.effects().await.len() >= ROWS);
    drop(running);
}
