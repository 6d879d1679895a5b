//! The rights of the guide are enough, and each of them is needed.

use tower_dedup::StoreError;
use tower_dedup::adapter::RedisAdapter;
use tower_dedup::adapter::contract::DedupAdapter;
use tower_dedup::adapter::maintenance::{ListFilter, MaintenanceAdapter};

use crate::command::{Ran, doctor};
use support::cluster::blocking;
use support::redis::{Cluster, Server};
use support::{dedup_key, on_claim, terms};

/// Returns the rights of the guide, without the password.
fn rights() -> Vec<&'static str> {
    let page = include_str!("../../../src/docs/stores/redis.md");
    let (_, rest) = page.split_once("\nACL SETUSER app on >PASSWORD ").expect("a line of rights");
    let (line, _) = rest.split_once("\n```").expect("the line ends");
    line.split_whitespace().collect()
}

fn set_user(server: &Server, rights: impl Iterator<Item = &'static str>) {
    let words: Vec<_> = ["ACL", "SETUSER", "app", "reset", "on", ">pw"].into_iter().collect();
    server.run::<()>(&words.into_iter().chain(rights).collect::<Vec<_>>());
    server.run::<()>(&["ACL", "LOG", "RESET"]);
}

/// Returns `true` if the server has refused this command to the user.
fn was_refused(server: &Server, command: &str) -> bool {
    let log: Vec<Vec<redis::Value>> = server.run(&["ACL", "LOG"]);
    let is = |value: &redis::Value| {
        redis::from_redis_value::<String>(value.clone()).is_ok_and(|text| text == command)
    };
    log.iter().any(|entry| entry.iter().any(is))
}

/// Calls every method, and `doctor`.
async fn use_everything(url: &str) -> (Vec<StoreError>, Ran) {
    let mut errors = Vec::new();
    match RedisAdapter::connect(url).await {
        Err(error) => errors.push(error),
        Ok(adapter) => {
            let mine = terms();
            let [a, b] = ["a", "b"].map(dedup_key);
            errors.extend(adapter.claim(&a, &on_claim(&mine)).await.err());
            errors.extend(adapter.release(&a, &on_claim(&mine)).await.err());
            errors.extend(adapter.claim(&b, &mine).await.err());
            errors.extend(adapter.renew(&b, &mine).await.err());
            errors.extend(adapter.complete(&b, &mine).await.err());
            errors.extend(adapter.release(&b, &mine).await.err());
            errors.extend(adapter.get(&b).await.err());
            errors.extend(adapter.list(&ListFilter::default(), None, 10).await.err());
            errors.extend(adapter.stats().await.err());
            errors.extend(adapter.forget(&b).await.err());
            adapter.close().await;
        }
    }
    (errors, doctor(url).await)
}

#[tokio::test]
async fn guide_rights_are_enough_and_each_is_needed() {
    let server = blocking(Server::start).await;
    let url = format!("redis://app:pw@{}", server.address());
    set_user(&server, rights().into_iter());
    let (errors, doctor) = use_everything(&url).await;
    assert!(errors.is_empty(), "{errors:?}");
    doctor.assert_finding("rights", "ok", "claims, releases, lists and INFO are permitted");

    let commands = rights().into_iter().filter_map(|right| right.strip_prefix('+'));
    let commands: Vec<_> = commands.collect();
    assert!(commands.len() >= 9, "{commands:?}");
    for command in commands {
        let others = rights().into_iter().filter(|right| right.strip_prefix('+') != Some(command));
        server.run::<()>(&["FLUSHALL"]);
        set_user(&server, others);
        server.run::<()>(&["SCRIPT", "FLUSH"]);
        let (errors, doctor) = use_everything(&url).await;
        assert!(was_refused(&server, command), "{command}: {errors:?} {doctor:?}");
        let is_ok = r#""check":"rights","level":"ok""#;
        assert!(!doctor.stdout.contains(is_ok), "{command}: {doctor:?}");
    }
}

#[tokio::test]
async fn guide_rights_are_enough_in_a_cluster() {
    let page = include_str!("../../../src/docs/stores/redis.md");
    let (_, rest) = page.split_once("A cluster also needs `").expect("the rights for a cluster");
    let more = rest.split('`').next().expect("the rights end").split_whitespace();
    let cluster = blocking(Cluster::shared).await;
    for node in cluster.nodes() {
        set_user(node, rights().into_iter().chain(more.clone()));
    }
    let url = cluster.url().replace("://", "://app:pw@");
    let (errors, doctor) = use_everything(&url).await;
    assert!(errors.is_empty(), "{errors:?}");
    doctor.assert_finding("rights", "ok", "");
    for node in cluster.nodes() {
        let refused = ["asking", "cluster|slots", "get", "info", "ping"];
        assert!(!refused.iter().any(|command| was_refused(node, command)));
    }
}
