//! A program that installs no cryptographic provider.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a failure fails the test")]

mod server;

use rustls::crypto::CryptoProvider;

#[tokio::test]
async fn adapter_installs_a_provider_where_there_is_none() {
    let server = server::Server::start();
    // It brings a provider of its own.
    server.connect_by_reqwest().await;
    assert!(CryptoProvider::get_default().is_none());
    server.ask_by_adapter().await;
    assert!(CryptoProvider::get_default().is_some());
    server.connect_by_reqwest().await;
}
