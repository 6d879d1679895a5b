//! Encrypted connections of the Redis adapter.

use std::path::Path;
use std::process::Command;

use tower_dedup::adapter::{RedisAdapter, RedisOptions};
use tower_dedup::{ConfigError, ErrorKind};

use super::redis_calls::{attempt, claim, config_error, options};
use crate::support::redis::Server;
use crate::support::terms;

/// Makes NAME.pem and NAME.key in the folder, and returns their texts.
fn certificate(folder: &Path, name: &str, options: &[&str]) -> (String, String) {
    let (certificate, key) = (format!("{name}.pem"), format!("{name}.key"));
    let output = Command::new("openssl")
        .args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"])
        .args(["-nodes", "-days", "2", "-subj", &format!("/CN={name}")])
        .args(["-keyout", &key, "-out", &certificate])
        .args(options)
        .current_dir(folder)
        .output()
        .expect("the program openssl: install it");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = |file: &str| std::fs::read_to_string(folder.join(file)).unwrap();
    (text(&certificate), text(&key))
}

/// A server that takes encrypted connections on a port of its own, and asks for a certificate.
struct TlsServer {
    server: Server,
    port: u16,
    authority: String,
    /// A certificate and its key.
    client: (String, String),
    _folder: tempfile::TempDir,
}

impl TlsServer {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let signed = |name: &str, options: &[&str]| certificate(folder.path(), name, options);
        // Without `-CA`, a certificate is signed by itself.
        let (authority, _) = signed("authority", &[]);
        let by_authority = ["-CA", "authority.pem", "-CAkey", "authority.key"];
        let host =
            ["-addext", "subjectAltName=DNS:localhost", "-addext", "basicConstraints=CA:FALSE"];
        signed("localhost", &[by_authority, host].concat());
        let client = signed("client", &by_authority);
        let file = |name: &str| folder.path().join(name).display().to_string();
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let server = Server::start_with(&[
            &format!("tls-port {port}"),
            &format!("tls-ca-cert-file {}", file("authority.pem")),
            &format!("tls-cert-file {}", file("localhost.pem")),
            &format!("tls-key-file {}", file("localhost.key")),
        ]);
        Self { server, port, authority, client, _folder: folder }
    }

    fn options(&self) -> RedisOptions {
        let (certificate, key) = self.client.clone();
        options().root_certificates(self.authority.clone()).client_certificate(certificate, key)
    }

    async fn refused(&self, host: &str, options: RedisOptions) {
        let url = format!("rediss://{host}:{}", self.port);
        let error = RedisAdapter::connect_with(&url, options).await.unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Timeout), "{error:?}");
    }
}

#[tokio::test]
async fn encrypted_connection_needs_a_trusted_certificate_of_the_host() {
    let tls = TlsServer::start();
    let url = format!("rediss://localhost:{}", tls.port);
    let adapter = RedisAdapter::connect_with(&url, tls.options()).await.unwrap();
    assert_eq!(attempt(claim(&adapter, "a", &terms()).await), 1);
    let list: String = tls.server.run(&["CLIENT", "LIST"]);
    assert_eq!(list.lines().count(), 2, "{list}");
    // The certificate is one of another host.
    tls.refused("127.0.0.1", tls.options()).await;
    // No authority that the client trusts has signed the certificate.
    tls.refused("localhost", options()).await;
    // The server wants a certificate of the client.
    tls.refused("localhost", options().root_certificates(tls.authority.clone())).await;
}

#[tokio::test]
async fn unreadable_certificates_are_refused_at_once() {
    let options = options().client_certificate("no PEM", "secret");
    assert!(!format!("{options:?}").contains("secret"), "{options:?}");
    let error = RedisAdapter::connect_with("rediss://localhost:1", options).await.unwrap_err();
    assert!(matches!(config_error(&error), ConfigError::InvalidSetting { .. }), "{error:?}");
}
