//! A program that installs a cryptographic provider.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a failure fails the test")]

mod server;

use std::sync::Arc;

use rustls::crypto::{CryptoProvider, aws_lc_rs};

#[tokio::test]
async fn provider_of_the_program_stays() {
    aws_lc_rs::default_provider().install_default().unwrap();
    let installed = Arc::clone(CryptoProvider::get_default().unwrap());
    let server = server::Server::start();
    server.ask_by_adapter().await;
    server.connect_by_reqwest().await;
    assert!(Arc::ptr_eq(&installed, CryptoProvider::get_default().unwrap()));
}
