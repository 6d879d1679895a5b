//! A Redis server that takes encrypted connections only, with a certificate that it has signed itself.

use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use reqwest::Certificate;
use tower_dedup::adapter::RedisAdapter;
use tower_dedup::adapter::maintenance::{Entry, MaintenanceAdapter};
use tower_dedup::redis::{Client, TlsCertificates};
use tower_dedup::{DedupKey, StoreErrorKind};

pub(crate) struct Server {
    process: Child,
    port: u16,
    certificate: String,
    _folder: tempfile::TempDir,
}

impl Server {
    pub(crate) fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let made = Command::new("openssl")
            .args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"])
            .args(["-nodes", "-days", "2", "-subj", "/CN=localhost", "-keyout", "key.pem"])
            .args(["-addext", "subjectAltName=DNS:localhost", "-out", "certificate.pem"])
            .args(["-addext", "basicConstraints=critical,CA:FALSE"])
            .current_dir(&folder)
            .output()
            .expect("the program openssl: install it");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        let certificate = std::fs::read_to_string(folder.path().join("certificate.pem")).unwrap();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let process = Command::new(program())
            .args(["--port", "0", "--tls-port", &port.to_string(), "--bind", "127.0.0.1"])
            .args(["--tls-cert-file", "certificate.pem", "--tls-key-file", "key.pem"])
            .args(["--tls-ca-cert-file", "certificate.pem", "--tls-auth-clients", "no"])
            .args(["--save", "", "--maxmemory-policy", "noeviction"])
            .current_dir(&folder)
            .stdout(Stdio::null())
            .spawn()
            .expect("the Redis server: see scripts/redis --find");
        let began = Instant::now();
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(began.elapsed() < Duration::from_secs(10), "the Redis server does not start");
            std::thread::sleep(Duration::from_millis(10));
        }
        Self { process, port, certificate, _folder: folder }
    }

    /// Asks for a key over an encrypted connection of the adapter.
    pub(crate) async fn ask_by_adapter(&self) {
        assert_eq!(self.ask_at("localhost").await, Ok(None));
        // The certificate is one of another host.
        assert_eq!(self.ask_at("127.0.0.1").await, Err(StoreErrorKind::Unavailable));
        // No authority that the client trusts has signed it.
        let untrusted = RedisAdapter::connect(&format!("rediss://localhost:{}", self.port)).await;
        assert_eq!(untrusted.unwrap_err().kind(), StoreErrorKind::Unavailable);
    }

    async fn ask_at(&self, host: &str) -> Result<Option<Entry>, StoreErrorKind> {
        let root_cert = Some(self.certificate.clone().into_bytes());
        let url = format!("rediss://{host}:{}", self.port);
        let certificates = TlsCertificates { client_tls: None, root_cert };
        let adapter = RedisAdapter::new(Client::build_with_tls(url, certificates).unwrap());
        let key = DedupKey::new("github", "id").unwrap();
        adapter.get(&key).await.map_err(|error| error.kind())
    }

    /// Connects by `reqwest`. The server does not speak HTTP, so the connection ends after its handshake.
    pub(crate) async fn connect_by_reqwest(&self) {
        let certificate = Certificate::from_pem(self.certificate.as_bytes()).unwrap();
        let client = reqwest::Client::builder().tls_certs_only([certificate]).build().unwrap();
        let response = client.get(format!("https://localhost:{}", self.port)).send();
        let error = response.await.expect_err("Redis speaks no HTTP");
        assert!(error.is_request() && !error.is_connect(), "{error:?}");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The process may have ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn program() -> String {
    let find = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/redis");
    let found = Command::new(find).arg("--find").output().unwrap();
    assert!(found.status.success(), "{}", String::from_utf8_lossy(&found.stderr));
    String::from_utf8(found.stdout).unwrap().lines().next().unwrap().trim().to_owned()
}
