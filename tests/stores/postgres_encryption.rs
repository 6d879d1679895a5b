//! The warning about a connection to another host without TLS.

use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::sync::Arc;

use sqlx::postgres::{PgConnectOptions, PgPoolOptions, PgSslMode};
use tokio::net::{TcpListener, TcpStream};
use tower_dedup::adapter::PostgresAdapter;
use tower_dedup::adapter::maintenance::MaintenanceAdapter;

use support::log::Log;
use support::postgres::Schema;

const WARNING: &str = "not encrypted";

/// Returns an address of this machine that is not a loopback address. No packet is sent.
fn own_address() -> IpAddr {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
    socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9)).expect("a network other than loopback");
    socket.local_addr().unwrap().ip()
}

/// Passes connections on to this server, from another address.
async fn relay(to: &PgConnectOptions) -> PgConnectOptions {
    let listener = TcpListener::bind((own_address(), 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    let server = (to.get_host().to_owned(), to.get_port());
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let mut server = TcpStream::connect(server.clone()).await.unwrap();
            tokio::spawn(
                async move { tokio::io::copy_bidirectional(&mut client, &mut server).await },
            );
        }
    });
    to.clone().host(&address.ip().to_string()).port(address.port())
}

fn adapter(options: PgConnectOptions) -> Arc<PostgresAdapter> {
    let pool = PgPoolOptions::new().max_connections(2).connect_lazy_with(options);
    Arc::new(PostgresAdapter::new(pool))
}

#[tokio::test]
async fn connection_to_another_host_without_tls_warns_once() {
    let schema = Schema::fresh();
    let here: PgConnectOptions = schema.url().parse().unwrap();
    let here = here.ssl_mode(PgSslMode::Disable);
    let elsewhere = relay(&here).await;
    let (log, _guard) = Log::of_this_thread();

    let local = adapter(here);
    local.stats().await.unwrap();
    assert_eq!(log.beginning(WARNING), []);

    let remote = adapter(elsewhere.clone());
    for _ in 0..3 {
        remote.stats().await.unwrap();
        remote.migrate().await.unwrap();
    }
    let warnings = log.beginning(WARNING);
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert_eq!((&*warnings[0]["level"], &*warnings[0]["host"]), ("WARN", elsewhere.get_host()));
}
