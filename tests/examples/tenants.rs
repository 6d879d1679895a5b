//! The example `tenants`: a secret and a namespace for each tenant. The requests are signed by the crate `hmac`.

use std::time::{SystemTime, UNIX_EPOCH};

use sqlx::{Connection, SqliteConnection};

use super::programs::example;
use super::senders::hmac_sha256;
use super::server::{Answer, Server, answer, duplicate, first};
use support::sqlite_url;

const REFUSED: Answer = (401, None);
const BODY: &str = r#"{"id":"e1","n":1}"#;

async fn deliver(server: &Server, tenant: &str, secret: &str, body: &'static str) -> Answer {
    let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let code = hmac_sha256(secret, &format!("{time}.{BODY}"));
    let request = server.post(tenant).header("x-time", time.to_string());
    let request = request.header("x-signature", format!("sha256={code}"));
    answer(&request.body(body).send().await.unwrap())
}

#[tokio::test]
async fn tenants_have_a_secret_and_keys_of_their_own() {
    let dir = tempfile::tempdir().unwrap();
    let url = sqlite_url(dir.path());
    let mut command = example("tenants");
    command.env("DATABASE_URL", &url).env("RUST_LOG", "tower_dedup=warn");
    let server = Server::spawn_with_env(&mut command).await;
    let mut database = SqliteConnection::connect(&url).await.unwrap();
    let tenants = [("acme", "secret of acme"), ("globex", "secret of globex"), ("initech", "s3")];
    for (name, secret) in tenants {
        let insert = sqlx::query("INSERT INTO tenants VALUES ($1, $2)").bind(name).bind(secret);
        insert.execute(&mut database).await.unwrap();
    }
    let deliver = async |tenant: &str, secret: &str, body| {
        deliver(&server, &format!("/{tenant}"), secret, body).await
    };

    // Forged, of another tenant, of nobody, and with an encoded name: nobody's id is used up.
    assert_eq!(deliver("acme", tenants[0].1, r#"{"id":"e1","n":2}"#).await, REFUSED);
    assert_eq!(deliver("acme", tenants[1].1, BODY).await, REFUSED);
    assert_eq!(deliver("acme", "", BODY).await, REFUSED);
    assert_eq!(deliver("umbrella", tenants[0].1, BODY).await, REFUSED);
    assert_eq!(deliver("%61cme", tenants[0].1, BODY).await, REFUSED);
    // One id of each tenant is an event of its own.
    for (name, secret) in tenants {
        assert_eq!(deliver(name, secret, BODY).await, first(), "{name}");
        assert_eq!(deliver(name, secret, BODY).await, duplicate(), "{name}");
    }

    // A look-up that fails is no refusal: the sender delivers again.
    let rename =
        |from, to| sqlx::query(sqlx::AssertSqlSafe(format!("ALTER TABLE {from} RENAME TO {to}")));
    rename("tenants", "away").execute(&mut database).await.unwrap();
    assert_eq!(deliver("acme", tenants[0].1, BODY).await, (503, None));
    rename("away", "tenants").execute(&mut database).await.unwrap();
    assert_eq!(deliver("acme", tenants[0].1, BODY).await, duplicate());

    let said = server.interrupt().await;
    for (name, _) in tenants {
        assert_eq!(said.matches(&format!("hooks:{name} e1: 17 bytes")).count(), 1, "{said}");
    }
    for reason in ["the signature does not match", "no verifier is known", "the look-up failed"] {
        assert!(said.contains(reason), "{reason}: {said}");
    }
    assert!(!said.contains("secret of"), "{said}");
}
