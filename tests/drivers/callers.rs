//! The callers of the guide's page run, and the page shows their code.

use ::diesel_async::{AsyncConnection, AsyncPgConnection};
use ::sea_orm::Database as SeaOrm;
use ::tokio_postgres::NoTls;

use super::{Database, diesel_async, record, sea_orm, tokio_postgres};

const PAGE: &str = include_str!("../../src/docs/stores/other_drivers.md");

#[test]
fn page_has_the_code_of_the_callers() {
    let blocks: Vec<_> = PAGE.split("```rust,ignore\n").skip(1).collect();
    let code: Vec<_> = blocks.iter().map(|rest| rest.split("```").next().unwrap()).collect();
    let sources = [
        include_str!("sea_orm.rs"),
        include_str!("diesel_async.rs"),
        include_str!("tokio_postgres.rs"),
    ];
    assert_eq!(code, sources.map(|source| source.replace("pub(crate) ", "")));
    assert!(PAGE.split_whitespace().count() <= 1_000);
    let prose = PAGE.split("```").step_by(2).flat_map(str::split_whitespace).count();
    assert!(prose <= 500, "{prose} words");
}

#[tokio::test]
async fn each_driver_commits_key_and_payment_once() {
    let database = Database::fresh().await;
    let url = database.schema.database_url();
    let sea = SeaOrm::connect(url).await.unwrap();
    let mut diesel = AsyncPgConnection::establish(url).await.unwrap();
    let (mut client, connection) = ::tokio_postgres::connect(url, NoTls).await.unwrap();
    tokio::spawn(connection);
    // Another transaction holds the key: nobody waits, and nothing is written.
    let mut open = database.pool.begin().await.unwrap();
    for id in ["a", "b", "c"] {
        assert_eq!(record(&mut open, "shop", id).await.unwrap(), "first");
    }
    assert_eq!(sea_orm::pay(&sea, "a").await.unwrap(), "in_flight");
    assert_eq!(diesel_async::pay(&mut diesel, "b").await.unwrap(), "in_flight");
    assert_eq!(tokio_postgres::pay(&mut client, "c").await.unwrap(), "in_flight");
    open.rollback().await.unwrap();
    for expected in ["first", "duplicate"] {
        assert_eq!(sea_orm::pay(&sea, "a").await.unwrap(), expected);
        assert_eq!(diesel_async::pay(&mut diesel, "b").await.unwrap(), expected);
        assert_eq!(tokio_postgres::pay(&mut client, "c").await.unwrap(), expected);
    }
    assert_eq!(database.payments().await, ["a", "b", "c"]);
}
