//! Encrypted connections of the Redis adapter.

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use tower_dedup::adapter::{RedisAdapter, RedisOptions};
use tower_dedup::{ConfigError, ErrorKind};

use super::redis_links::{attempt, claim, config_error, options};
use crate::support::redis::Server;
use crate::support::terms;

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
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        // A certificate whose issuer has its own name counts as signed by itself.
        params.distinguished_name.push(DnType::CommonName, "authority");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let signed = |name: &str| {
            let key = KeyPair::generate().unwrap();
            let params = CertificateParams::new([name.to_owned()]).unwrap();
            (params.signed_by(&key, &authority).unwrap().pem(), key.serialize_pem())
        };
        let (certificate, key) = signed("localhost");
        let write = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            path.display().to_string()
        };
        let authority_file = write("ca.pem", &authority.pem());
        let (certificate, key) = (write("server.pem", &certificate), write("server.key", &key));
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let server = Server::start_with(&[
            &format!("tls-port {port}"),
            &format!("tls-ca-cert-file {authority_file}"),
            &format!("tls-cert-file {certificate}"),
            &format!("tls-key-file {key}"),
        ]);
        let client = signed("client");
        Self { server, port, authority: authority.pem(), client, _folder: folder }
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
