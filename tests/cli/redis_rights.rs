//! The rights of the guide are enough, and each of them is needed.

use std::collections::BTreeMap;

use tower_dedup::Error;
use tower_dedup::adapter::{
    CallTerms, DedupAdapter, Forgotten, ListFilter, MaintenanceAdapter, RedisAdapter, RerunOrder,
    Token,
};

use crate::command::run;
use crate::support::cluster::blocking;
use crate::support::redis::Server;
use crate::support::{FIRST, dedup_key, on_claim, terms};

/// Returns the words of the guide's line after `ACL`.
fn rights() -> Vec<String> {
    let page = include_str!("../../src/docs/redis.md");
    let (_, rest) = page.split_once("\nACL SETUSER app on >PASSWORD ").expect("a line of rights");
    let (line, _) = rest.split_once("\n```").expect("the line ends");
    line.split_whitespace().map(str::to_owned).collect()
}

fn set_user(server: &Server, rights: &[&str]) {
    server.run::<()>(&[&["ACL", "SETUSER", "app", "reset", "on", ">pw"], rights].concat());
}

/// Calls everything.
async fn use_everything(url: &str) -> Result<(), Error> {
    let adapter = RedisAdapter::connect(url).await?;
    let mine = terms();
    let [a, b] = ["a", "b"].map(|id| [dedup_key(id)]);
    assert_eq!(adapter.claim(&a, &on_claim(&mine)).await?, [FIRST]);
    adapter.release(&a, &on_claim(&mine)).await?;
    adapter.claim(&b, &mine).await?;
    adapter.renew(&b, &mine).await?;
    adapter.release(&b, &mine).await?;
    adapter.claim(&b, &mine).await?;
    adapter.complete(&b, &mine).await?;
    adapter.allow_rerun(&b, &RerunOrder::new("ada", "x")?).await?;
    adapter.get(&b[0]).await?;
    assert_eq!(adapter.list(&ListFilter::new(), None, 10).await?.keys.len(), 1);
    adapter.stats().await?;
    assert_eq!(adapter.forget(&b[0]).await?, Forgotten::Removed);
    adapter.stored_losses().await?;
    adapter.close().await;
    Ok(())
}

#[tokio::test]
async fn guide_rights_are_enough_and_each_is_needed() {
    let server = blocking(Server::start).await;
    let rights = rights();
    let words: Vec<&str> = rights.iter().map(String::as_str).collect();
    set_user(&server, &words);
    let url = format!("redis://app:pw@{}", server.address());
    use_everything(&url).await.unwrap();
    let doctor = run(&url, &["doctor"]).await;
    doctor.assert(0, "ok       rights");
}
