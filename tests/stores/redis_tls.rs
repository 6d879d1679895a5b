//! Encrypted connections of the Redis adapter.

use std::path::Path;
use std::process::Command;

use redis::{Client, ClientTlsConfig, TlsCertificates};
use tower_dedup::adapter::RedisAdapter;
use tower_dedup::{StoreError, StoreErrorKind};

use super::redis_calls::{attempt, claim, options};
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

    /// Returns a client of this host that trusts the authority, with a certificate of its own or without.
    fn client(&self, host: &str, shows_certificate: bool) -> Client {
        let (client_cert, client_key) = self.client.clone();
        let config = ClientTlsConfig {
            client_cert: client_cert.into_bytes(),
            client_key: client_key.into_bytes(),
        };
        let certificates = TlsCertificates {
            client_tls: shows_certificate.then_some(config),
            root_cert: Some(self.authority.clone().into_bytes()),
        };
        let url = format!("rediss://{host}:{}", self.port);
        Client::build_with_tls(url, certificates).unwrap()
    }
}

async fn refused(adapter: Result<RedisAdapter, StoreError>) {
    let error = match adapter {
        Ok(adapter) => claim(&adapter, "a", &terms()).await.unwrap_err(),
        Err(error) => error,
    };
    assert!(
        matches!(error.kind(), StoreErrorKind::Unavailable | StoreErrorKind::Timeout),
        "{error:?}"
    );
}

#[tokio::test]
async fn encrypted_connection_needs_a_trusted_certificate_of_the_host() {
    let tls = TlsServer::start();
    // No authority that the client trusts has signed the certificate. It installs the provider too.
    let url = format!("rediss://localhost:{}", tls.port);
    refused(RedisAdapter::connect_with(&url, options()).await).await;
    let with = |client| RedisAdapter::with_options(client, options());
    let adapter = with(tls.client("localhost", true)).unwrap();
    assert_eq!(attempt(claim(&adapter, "a", &terms()).await), 1);
    let list: String = tls.server.run(&["CLIENT", "LIST"]);
    assert_eq!(list.lines().count(), 2, "{list}");
    // The certificate is one of another host.
    refused(with(tls.client("127.0.0.1", true))).await;
    // The server wants a certificate of the client.
    refused(with(tls.client("localhost", false))).await;
}
