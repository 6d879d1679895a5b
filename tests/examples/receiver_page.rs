//! The page and the metrics of the example `receiver`, over HTTP.

use serde_json::json;

use crate::programs::{example, start};
use crate::server::{Server, answer, duplicate, effect, eventually, first};
use support::postgres::Schema;

/// The rows of a section of the page: the texts of their cells.
pub(super) fn rows(page: &str, section: &str) -> Vec<Vec<String>> {
    let heading = format!("<h2>{section}</h2>");
    let (_, rest) = page.split_once(&heading).unwrap_or_else(|| panic!("no {section}: {page}"));
    let section = rest.split("<h2>").next().unwrap();
    let rows = section.split("<tr>").skip(1).filter(|row| row.contains("<td"));
    rows.map(|row| row.split("</td>").map(without_tags).collect()).collect()
}

fn without_tags(html: &str) -> String {
    let texts = html.split('<').map(|part| part.split_once('>').map_or(part, |(_, text)| text));
    texts.collect::<String>().trim().to_owned()
}

/// The id in a row of a section's first cell.
fn id(row: &[String]) -> &str {
    row[0].strip_prefix("standard-webhooks ").unwrap_or(&row[0])
}

/// The newest deliveries: verdict, outcome, attempt and status of each.
fn deliveries(page: &str) -> Vec<String> {
    rows(page, "Last deliveries").into_iter().map(|row| row[1..5].join(" | ")).collect()
}

impl Server {
    pub(super) async fn page(&self, query: &str) -> String {
        let answer = self.request(&format!("/{query}")).send().await.unwrap();
        answer.error_for_status().unwrap().text().await.unwrap()
    }

    /// Presses a button as a browser does, which follows the redirect to the page.
    pub(super) async fn press(&self, button: &str, id: &str) -> String {
        let request = self.post("/try").header("sec-fetch-site", "same-origin");
        let answer = request.form(&[("button", button), ("id", id)]).send().await.unwrap();
        assert_eq!(answer.url().path(), "/");
        answer.error_for_status().unwrap().text().await.unwrap()
    }
}

/// Presses every button, and reads on the page what each has done.
async fn buttons(store: &str, ledger: &str) {
    let args = ["--store", store, "--ledger", ledger, "--compare-payload"];
    let receiver = start("receiver", &args).await;
    let page = receiver.page("").await;
    assert!(page.contains(r#"<meta http-equiv="refresh" content="2; url=/">"#), "{page}");
    assert!(deliveries(&page).is_empty());

    let page = receiver.press("once", "").await;
    let once = id(&rows(&page, "Try it")[0]).to_owned();
    assert_eq!(deliveries(&page)[0], "first | completed | 1 | 200");
    assert_eq!(id(&rows(&page, "Last deliveries")[0]), once);
    let page = receiver.press("again", &once).await;
    assert_eq!(deliveries(&page)[0], "duplicate | duplicate |  | 200");
    assert_eq!(rows(&page, "Try it")[0][2], "200 duplicate");
    assert!(page.contains("<strong>1</strong>"), "{page}");
    let page = receiver.press("other-payload", &once).await;
    assert_eq!(deliveries(&page)[0], "mismatch | mismatch |  | 200");
    assert!(rows(&page, "Other records")[0][1].starts_with("payload mismatch"), "{page}");

    // Both requests were under way together, and the event took effect once.
    let page = receiver.press("twice-at-once", "").await;
    let twice = id(&rows(&page, "Try it")[0]).to_owned();
    let ended = deliveries(&page);
    assert!(ended[..2].contains(&"first | completed | 1 | 200".to_owned()), "{ended:?}");
    assert!(ended[..2].contains(&"duplicate | duplicate |  | 200".to_owned()), "{ended:?}");
    let mut expected = vec![effect(&once, 1), effect(&twice, 1)];

    let page = receiver.press("failing", "").await;
    let failing = id(&rows(&page, "Try it")[0]).to_owned();
    assert_eq!(deliveries(&page)[0], "first | failed | 1 | 500");
    let page = receiver.press("again", &failing).await;
    assert_eq!(deliveries(&page)[0], "first | completed | 2 | 200");
    expected.push(effect(&failing, 1));
    let effects = receiver.get("/effects").await;
    assert_eq!(effects.as_array().map(Vec::len), Some(expected.len()));
    for effect in expected {
        assert!(effects.as_array().unwrap().contains(&effect), "{effects} {effect}");
    }

    let outcomes = rows(&page, "Deliveries by outcome");
    let total: u64 = outcomes.iter().map(|row| row[1].parse::<u64>().unwrap()).sum();
    assert_eq!(total, 7, "{outcomes:?}");
    let facts = receiver.page(&format!("?id={once}")).await;
    assert!(!facts.contains("http-equiv"), "the page of a look-up does not refresh itself");
    let of_event = rows(&facts, "Its deliveries").len();
    let facts = rows(&facts, "Look up an event");
    for fact in ["complete since", "expiresin 30 days", "payloadSHA-256"] {
        assert!(facts.iter().any(|row| row[0].contains(fact)), "{fact}: {facts:?}");
    }
    // First, duplicate, mismatch.
    assert_eq!(of_event, 3);
    for page in [page, receiver.page("?id=").await] {
        assert!(!page.contains(args[1]), "the URL of the store may have a password");
        for outside in ["<script", "<link", "src=", "://"] {
            assert!(!page.contains(outside), "{outside}: {page}");
        }
    }
    receiver.stop().await;
}

#[tokio::test]
async fn buttons_in_memory_lease() {
    buttons("memory:", "lease").await;
}

#[tokio::test]
async fn buttons_on_postgres_transactional() {
    buttons(&Schema::fresh().url(), "transactional").await;
}

/// With a secret, the buttons sign, and a forged delivery is refused before its id is looked at.
#[tokio::test]
async fn buttons_sign_for_a_receiver_that_verifies() {
    let mut receiver = example("receiver");
    receiver.args(["--store", "memory:"]);
    receiver.env("WEBHOOK_SECRET_STANDARD_WEBHOOKS", "whsec_c2VjcmV0IG9mIHRoaXMgdGVzdA==");
    let receiver = Server::spawn(&mut receiver).await;
    eventually(|| receiver.said().contains("verified: standard-webhooks\n")).await;
    assert!(!receiver.said().contains("curl -i"), "{}", receiver.said());
    assert_eq!(receiver.deliver("msg_1", "").await.0, 401);
    let page = receiver.press("once", "").await;
    let once = id(&rows(&page, "Try it")[0]).to_owned();
    let page = receiver.press("forged", "").await;
    assert_eq!(rows(&page, "Try it")[0][2], "401");
    let record = &rows(&page, "Other records")[0][1];
    for part in [
        "not verified",
        "path: /webhooks/standard-webhooks",
        "preset: standard-webhooks",
        "reason: ",
    ] {
        assert!(record.contains(part), "{part}: {record}");
    }
    let page = receiver.press("again", &once).await;
    assert_eq!(rows(&page, "Try it")[0][2], "200 duplicate");
    assert_eq!(receiver.get("/effects").await, json!([effect(&once, 1)]));
    receiver.stop().await;
}

#[tokio::test]
async fn page_escapes_what_comes_from_outside() {
    let receiver = start("receiver", &["--store", "memory:"]).await;
    let hostile = r#"<script>alert("1")</script>'&"#;
    assert_eq!(receiver.deliver(hostile, "").await, first());
    let pressed = receiver.press("again", hostile).await;
    assert_eq!(rows(&pressed, "Try it")[0][2], "200 duplicate");
    let query = |name: &str| {
        let mut query = form_urlencoded::Serializer::for_suffix("?".to_owned(), 1);
        query.append_pair("id", hostile).append_pair(name, hostile).finish()
    };
    for page in
        [pressed, receiver.page(&query("other")).await, receiver.page(&query("namespace")).await]
    {
        assert!(page.contains("&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt;"), "{page}");
        assert!(!page.contains("<script"), "{page}");
        // No attribute ends early.
        assert!(!page.contains(r#"alert("1")"#), "{page}");
    }
    receiver.stop().await;
}

/// A foreign site can neither press a button nor read the page under a name of its own.
#[tokio::test]
async fn page_refuses_foreign_sites() {
    let args = ["--store", "memory:", "--public-url", "https://hooks.example.com"];
    let receiver = start("receiver", &args).await;
    let pressed = async |headers: &[(&str, &str)]| {
        let request = receiver.post("/try").form(&[("button", "once")]);
        let request =
            headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
        answer(&request.send().await.unwrap()).0
    };
    assert_eq!(pressed(&[("sec-fetch-site", "cross-site")]).await, 403);
    assert_eq!(pressed(&[("sec-fetch-site", "same-site")]).await, 403);
    assert_eq!(pressed(&[("origin", "https://evil.example")]).await, 403);
    assert_eq!(pressed(&[("origin", "null")]).await, 403);
    let rebound = [("origin", "http://evil.example"), ("host", "evil.example")];
    assert_eq!(pressed(&rebound).await, 403);
    assert_eq!(receiver.get("/effects").await, json!([]), "no button was pressed");
    let shown = async |host: &str| {
        answer(&receiver.request("/").header("host", host).send().await.unwrap()).0
    };
    assert_eq!(shown("evil.example").await, 403);
    for host in ["localhost:3000", "127.0.0.1", "[::1]:3000", "hooks.example.com"] {
        assert_eq!(shown(host).await, 200, "{host}");
    }
    // Nor the ids and the numbers. A sender delivers under any name.
    for path in ["/effects", "/metrics"] {
        for (host, status) in [("evil.example", 403), ("localhost:3000", 200), ("127.0.0.1", 200)] {
            let request = receiver.request(path).header("host", host);
            assert_eq!(answer(&request.send().await.unwrap()).0, status, "{path} {host}");
        }
    }
    let webhook = receiver.post("/webhooks/standard-webhooks").header("webhook-id", "msg_1");
    assert_eq!(answer(&webhook.header("host", "any.example").send().await.unwrap()), first());
    assert_eq!(pressed(&[("sec-fetch-site", "same-origin")]).await, 200);
    assert_eq!(pressed(&[]).await, 200, "curl is no browser");
    // A header that is no text, and a button that does not exist.
    let request = receiver.post("/try").form(&[("button", "again"), ("id", "a\nb")]);
    assert_eq!(answer(&request.send().await.unwrap()).0, 400);
    let request = receiver.post("/try").form(&[("button", "other")]);
    assert_eq!(answer(&request.send().await.unwrap()).0, 422);
    receiver.stop().await;
}

#[tokio::test]
async fn metrics_are_what_prometheus_reads() {
    let receiver = start("receiver", &["--store", "memory:"]).await;
    assert_eq!(receiver.deliver("msg_1", "").await, first());
    assert_eq!(receiver.deliver("msg_1", "").await, duplicate());
    let answer = receiver.request("/metrics").send().await.unwrap();
    assert_eq!(answer.headers()["content-type"], "text/plain; version=0.0.4");
    let text = answer.text().await.unwrap();
    for expected in [
        r#"tower_dedup_deliveries_total{namespace="standard-webhooks",outcome="duplicate"} 1"#,
        "# HELP tower_dedup_deliveries_total Deliveries by outcome",
        "# TYPE tower_dedup_delivery_duration_seconds histogram",
    ] {
        assert!(text.lines().any(|line| line == expected), "{expected}: {text}");
    }
    receiver.stop().await;
}
