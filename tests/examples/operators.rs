//! The examples `catch_up` and `admin`.

use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

use super::programs::{example, piped};
use super::senders::{PUSH, deliver_push, deliver_to_stripe, start_providers};
use super::server::{Server, duplicate, first};
use support::sqlite_url;

async fn catch_up(store: &str, args: &[&str], list: &Value) -> String {
    let mut command = example("catch_up");
    let (succeeded, said) =
        piped(command.args(args).env("DATABASE_URL", store), &list.to_string()).await;
    assert!(succeeded, "{said}");
    said
}

/// The receiver is the example `providers`.
#[tokio::test]
async fn catch_up_runs_what_the_receiver_has_not_handled_and_later_retries_are_duplicates() {
    let dir = tempfile::tempdir().unwrap();
    let store = sqlite_url(dir.path());
    let receiver = start_providers(&store).await;
    assert_eq!(deliver_to_stripe(&receiver, "evt_1").await, first());

    let event = |id| json!({ "id": id, "type": "charge.succeeded", "request": { "id": null } });
    let list =
        json!({ "object": "list", "data": [event("evt_3"), event("evt_2"), event("evt_1")] });
    let run = |id| format!("stripe {id} charge.succeeded: 62 bytes\n");
    // Without `--run`, it uses no event up.
    let listed = "not handled: evt_2 (unknown)\nnot handled: evt_3 (unknown)\n";
    for _ in 0..2 {
        assert_eq!(catch_up(&store, &["stripe"], &list).await, listed);
    }
    let expected = format!("duplicate: evt_1\n{}{}", run("evt_2"), run("evt_3"));
    assert_eq!(catch_up(&store, &["stripe", "--run"], &list).await, expected);
    assert_eq!(catch_up(&store, &["stripe"], &list).await, "");
    assert_eq!(deliver_to_stripe(&receiver, "evt_2").await, duplicate());

    let delivery = |id: &str, event: &str, payload: Value| {
        let headers = json!({ "X-GitHub-Delivery": id, "X-GitHub-Event": event });
        json!({ "guid": id, "request": { "headers": headers, "payload": payload } })
    };
    let push = serde_json::from_str(PUSH).unwrap();
    let list = json!([
        delivery("g1", "push", push),
        delivery("g0", "ping", json!({ "zen": "Keep it simple.", "hook_id": 1 }))
    ]);
    assert_eq!(catch_up(&store, &["github"], &list).await, "not handled: g1 (unknown)\n");
    assert_eq!(deliver_push(&receiver, "g1").await, first());
    let list =
        json!([list[0], list[1], delivery("g2", "push", list[0]["request"]["payload"].clone())]);
    let expected = "github g2 push: 48 bytes\nduplicate: g1\n";
    assert_eq!(catch_up(&store, &["github", "--run"], &list).await, expected);
    assert_eq!(deliver_push(&receiver, "g2").await, duplicate());
    receiver.interrupt().await;
}

#[tokio::test]
async fn admin_lists_shows_and_forgets_keys_for_its_token_only() {
    let dir = tempfile::tempdir().unwrap();
    let store = sqlite_url(dir.path());
    let list = json!([{ "id": "evt/1", "type": "charge.succeeded" }, { "id": "evt_2" }]);
    catch_up(&store, &["stripe", "--run"], &list).await;
    let mut command = example("admin");
    command.env("DATABASE_URL", &store).env("ADMIN_TOKEN", "the_token_of_this_test");
    let server = Server::spawn_with_env(&mut command).await;
    let ask = async |method: Method, path: &str, token: &str| {
        let request = server.client.request(method, format!("{}{path}", server.address));
        let response = request.bearer_auth(token).send().await.unwrap();
        (response.status().as_u16(), response.json::<Value>().await.unwrap_or_default())
    };
    let get = async |path: &str| ask(Method::GET, path, "the_token_of_this_test").await;

    for (method, path) in
        [(Method::GET, ""), (Method::GET, "/stripe/evt_2"), (Method::DELETE, "/stripe/evt_2")]
    {
        assert_eq!(ask(method, path, "another").await.0, 401);
    }
    assert_eq!(server.request("").send().await.unwrap().status(), StatusCode::UNAUTHORIZED);

    let (status, page) = get("?namespace=stripe&state=complete").await;
    assert_eq!((status, &page["next"]), (200, &Value::Null));
    let mut ids: Vec<_> = page["keys"].as_array().unwrap().iter().map(|key| &key["id"]).collect();
    ids.sort_by_key(|id| id.as_str());
    assert_eq!(ids, ["evt/1", "evt_2"]);
    assert_eq!(get("?state=released").await.1["keys"], json!([]));
    assert_eq!(get("?id=evt%2F").await.1["keys"].as_array().map(Vec::len), Some(1));
    assert_eq!(get("?state=none").await.0, 400);
    let (status, key) = get("/stripe/evt%2F1").await;
    assert_eq!(status, 200);
    assert_eq!(
        (&key["entry"]["state"], &key["entry"]["attempts"]),
        (&json!("complete"), &json!(1))
    );

    for status in [204, 404] {
        let forgotten = ask(Method::DELETE, "/stripe/evt%2F1", "the_token_of_this_test").await;
        assert_eq!(forgotten.0, status);
    }
    assert_eq!(get("/stripe/evt%2F1").await.0, 404);
    server.end().await;
    // It runs again.
    assert!(catch_up(&store, &["stripe", "--run"], &list).await.contains("evt/1 charge"));
}
