//! The guide's statements about databases and its SQL hold. Linked sections exist.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::routing::post;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{AssertSqlSafe, Connection, PgConnection, PgPool, Row, SqliteConnection};
use tower::ServiceExt;
use tower_dedup::adapter::contract::{
    CallTerms, ClaimReply, CompleteReply, DedupAdapter, RenewReply, Token,
};
use tower_dedup::adapter::maintenance::{ForgetReply, ListFilter, MaintenanceAdapter};
use tower_dedup::adapter::{PostgresAdapter, PostgresOptions, SqliteAdapter};
use tower_dedup::{CommitError, DedupKey, DedupLayer, Delivery};

use support::postgres::{Schema, Server};
use support::{FIRST, by_header, claim_all, dedup_key, on_claim, rows, sqlite_url, terms};

/// Returns the SQL of the guide that contains these words.
fn sql(words: &str) -> String {
    let pages = ["incidents", "transactions", "production"].map(read).into_iter();
    let pages: Vec<_> = pages.chain([text("src/docs/stores/postgres.md")]).collect();
    let blocks = pages.iter().flat_map(|page| page.split("```sql\n").skip(1));
    let mut blocks = blocks.map(|rest| {
        let end = rest.find("```").expect("a block ends");
        rest[..end].trim_end()
    });
    blocks.find(|block| block.contains(words)).expect("a block with these words").to_owned()
}

/// The event that the guide looks for, among others.
fn the_event() -> DedupKey {
    DedupKey::new("github", "THE-ID").unwrap()
}

async fn record<A: DedupAdapter>(adapter: &A) {
    let others = [("github", "THE-OTHER-ID"), ("acme", "THE-ID")];
    for (namespace, id) in others {
        let key = DedupKey::new(namespace, id).unwrap();
        assert_eq!(adapter.claim(&key, &on_claim(&terms())).await.unwrap(), FIRST);
    }
    assert_eq!(adapter.claim(&the_event(), &on_claim(&terms())).await.unwrap(), FIRST);
}

#[tokio::test]
async fn guide_query_finds_the_event_on_postgres() {
    let schema = Schema::fresh();
    record(&PostgresAdapter::connect(&schema.url()).await.unwrap()).await;
    let mut connection = PgConnection::connect(&schema.url()).await.unwrap();
    let query = sql("sha256(");
    let rows = sqlx::query(AssertSqlSafe(query.clone())).fetch_all(&mut connection).await.unwrap();
    let [row] = &rows[..] else { panic!("{} rows", rows.len()) };
    assert_eq!((row.get("namespace"), row.get("id")), ("github", "THE-ID"));
    // For three rows a scan is faster than the index.
    sqlx::query("SET enable_seqscan = off").execute(&mut connection).await.unwrap();
    let plan: Vec<String> = sqlx::query_scalar(AssertSqlSafe(format!("EXPLAIN {query}")))
        .fetch_all(&mut connection)
        .await
        .unwrap();
    assert!(plan[0].contains("using webhook_deliveries_pkey"), "{plan:?}");
    // The log names the event by the digest that the shell command computes.
    let fingerprint: String =
        sqlx::query_scalar("SELECT left(encode(sha256('THE-ID'), 'hex'), 16)")
            .fetch_one(&mut connection)
            .await
            .unwrap();
    assert_eq!(fingerprint, the_event().log_id());
}

#[tokio::test]
async fn guide_query_finds_the_event_on_sqlite() {
    let dir = tempfile::tempdir().unwrap();
    let url = sqlite_url(dir.path());
    record(&SqliteAdapter::connect(&url).await.unwrap()).await;
    let mut connection = SqliteConnection::connect(&url).await.unwrap();
    let query = sql("'unixepoch'");
    let rows = sqlx::query(AssertSqlSafe(query.clone())).fetch_all(&mut connection).await.unwrap();
    let [row] = &rows[..] else { panic!("{} rows", rows.len()) };
    assert_eq!((row.get("namespace"), row.get("id")), ("github", "THE-ID"));
    let year: String = sqlx::query_scalar("SELECT strftime('%Y', 'now')")
        .fetch_one(&mut connection)
        .await
        .unwrap();
    assert!(row.get::<String, _>("completed").starts_with(&year), "the time is readable");
    let plan = sqlx::query(AssertSqlSafe(format!("EXPLAIN QUERY PLAN {query}")))
        .fetch_all(&mut connection)
        .await
        .unwrap();
    let step: String = plan[0].get("detail");
    assert!(step.contains("PRIMARY KEY (namespace=? AND id=?)"), "{step}");
}

#[tokio::test]
async fn guide_backfill_makes_old_events_duplicates() {
    let schema = Schema::fresh();
    let adapter = PostgresAdapter::connect(&schema.url()).await.unwrap();
    adapter.migrate().await.unwrap();
    let mut connection = PgConnection::connect(&schema.url()).await.unwrap();
    let table = "CREATE TABLE processed_events (event_id text PRIMARY KEY, received_at timestamptz); \
                 INSERT INTO processed_events VALUES ('new', now() - interval '1 day'), \
                 ('old', now() - interval '31 days')";
    sqlx::raw_sql(table).execute(&mut connection).await.unwrap();
    // A second run changes nothing.
    for inserted in [1, 0] {
        let backfill = sqlx::query(AssertSqlSafe(sql("FROM processed_events")));
        assert_eq!(backfill.execute(&mut connection).await.unwrap().rows_affected(), inserted);
    }
    let claim = async |id| {
        let key = DedupKey::new("stripe", id).unwrap();
        adapter.claim(&key, &terms()).await.unwrap()
    };
    assert!(matches!(claim("new").await, ClaimReply::Duplicate(_)));
    assert_eq!(claim("old").await, FIRST);
    let entry = adapter.get(&DedupKey::new("stripe", "new").unwrap()).await.unwrap().unwrap();
    let month = Duration::from_secs(30 * 24 * 60 * 60);
    assert_eq!(entry.expires_at.duration_since(entry.first_seen_at).unwrap(), month);
}

#[tokio::test]
async fn guide_schema_is_the_schema() {
    let nowhere = PgPoolOptions::new().connect_lazy("postgres://localhost/any").unwrap();
    let statements = PostgresAdapter::new(nowhere).schema_sql();
    let words = |sql: &str| sql.split_whitespace().collect::<Vec<_>>().join(" ");
    assert_eq!(words(&sql("CREATE TABLE")), words(&(statements.join("; ") + ";")));
}

/// The guide's privileges for migration suffice to create the table. Its privileges for operation
/// suffice for every call.
#[tokio::test]
async fn guide_privileges_are_enough() {
    // A server of its own, because roles belong to all databases of a server.
    let server = Server::start();
    let mut admin = PgConnection::connect(&server.url()).await.unwrap();
    let run = async |admin: &mut PgConnection, sql: String| {
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(admin).await.unwrap();
    };
    let roles = "CREATE SCHEMA webhooks; CREATE ROLE migrator LOGIN; CREATE ROLE app LOGIN; \
                 CREATE ROLE handler LOGIN; CREATE TABLE webhooks.effects (id text); \
                 GRANT ALL ON webhooks.effects TO handler;";
    run(&mut admin, roles.to_owned()).await;
    let pool = |role: &str| {
        let options = PgConnectOptions::from_str(&server.url()).unwrap().username(role);
        PgPoolOptions::new().max_connections(4).connect_lazy_with(options)
    };
    let adapter = |pool: PgPool| {
        let options = PostgresOptions::new().schema("webhooks");
        PostgresAdapter::with_options(pool, options)
    };
    run(&mut admin, sql("TO migrator")).await;
    adapter(pool("migrator")).migrate().await.unwrap();
    run(&mut admin, sql("TO app")).await;

    let app_pool = pool("app");
    let refused = sqlx::query("CREATE TABLE webhooks.other ()").execute(&app_pool).await;
    assert!(refused.is_err(), "the role has too many privileges for this test");
    let (app, mine) = (adapter(app_pool.clone()), terms());
    app.migrate().await.unwrap();
    let [a, b, c] = ["a", "b", "c"].map(dedup_key);
    assert_eq!(app.claim(&a, &on_claim(&mine)).await.unwrap(), FIRST);
    app.release(&a, &on_claim(&mine)).await.unwrap();
    assert_eq!(app.claim(&b, &mine).await.unwrap(), ClaimReply::first(1, false));
    assert_eq!(app.renew(&b, &mine).await.unwrap(), RenewReply::Held);
    app.release(&b, &mine).await.unwrap();
    assert_eq!(app.claim(&b, &mine).await.unwrap(), ClaimReply::first(2, false));
    assert_eq!(app.complete(&b, &mine).await.unwrap(), CompleteReply::Held);
    assert!(app.get(&b).await.unwrap().is_some());
    assert_eq!(app.forget(&c).await.unwrap(), ForgetReply::Missing);
    // A batch looks up which of its keys is held.
    let mut theirs = app_pool.begin().await.unwrap();
    let hour = Duration::from_secs(3_600);
    assert_eq!(app.record_in(&mut theirs, &c, hour).await.unwrap(), FIRST);
    let claimed = claim_all(&app, &[b.clone(), c.clone()], &mine).await.unwrap();
    assert!(matches!(claimed[..], [ClaimReply::Duplicate(_), ClaimReply::InFlight]));
    theirs.rollback().await.unwrap();
    let listed = app.list(&ListFilter::default(), None, 10).await.unwrap();
    assert!(listed.keys.iter().map(|(key, _)| key).eq([&b]), "{listed:?}");
    assert_eq!(app.forget(&b).await.unwrap(), ForgetReply::Removed);
    let past = CallTerms::on_claim(Token::random(), Duration::ZERO);
    assert_eq!(app.claim(&c, &on_claim(&past)).await.unwrap(), FIRST);
    let aged = "UPDATE webhooks.webhook_deliveries SET expires_at = now() - interval '1 hour'";
    run(&mut admin, aged.to_owned()).await;
    // With the rows of the released and of the forgotten key.
    assert_eq!(app.purge(10).await.unwrap(), 3);
    assert_eq!(rows(&app).await, 0);

    // The completion runs as the role of the handler, whatever its `search_path`.
    run(&mut admin, sql("TO handler")).await;
    let handlers = pool("handler");
    let handler = async move |event: Delivery, script: String| {
        let mut tx = event.begin(&handlers).await?;
        let insert = sqlx::query("INSERT INTO webhooks.effects VALUES ($1)").bind(&script);
        insert.execute(&mut *tx).await?;
        let sql = match &*script {
            "fail" => return Ok(StatusCode::BAD_GATEWAY),
            "spoil" => "ROLLBACK",
            _ => "SET LOCAL search_path = ''",
        };
        sqlx::query(sql).execute(&mut *tx).await?;
        tx.commit().await?;
        Ok::<_, CommitError>(StatusCode::OK)
    };
    let layer = DedupLayer::transactional(by_header(), app.clone());
    let service: Router = Router::new().route("/", post(handler)).layer(layer);
    for (script, status) in [("fail", 502), ("spoil", 500), ("work", 200), ("", 200)] {
        let request = Request::post("/").header("webhook-id", "d");
        let request = request.body(Body::from(script)).unwrap();
        assert_eq!(service.clone().oneshot(request).await.unwrap().status(), status, "{script}");
    }
    let effects: Vec<String> =
        sqlx::query_scalar("SELECT id FROM webhooks.effects").fetch_all(&mut admin).await.unwrap();
    assert_eq!(effects, ["work"]);
}

/// `tests/drivers` runs them.
#[test]
fn calls_of_other_drivers_are_those_of_their_tests() {
    let page = read("transactions");
    let table = page.lines().skip_while(|line| !line.starts_with("| driver |")).skip(2);
    let rows: Vec<_> = table.take_while(|line| line.starts_with('|')).collect();
    for row in &rows {
        let (driver, calls) = row.trim_matches('|').split_once('|').expect("two cells");
        let source =
            text(&format!("tests/drivers/{}.rs", driver.trim().replace(['-', ' ', '.'], "_")));
        for call in calls.split('`').skip(1).step_by(2) {
            assert!(source.contains(call), "{driver}: {call}");
        }
    }
    assert_eq!(rows.len(), 5);
}

pub(super) fn text(file: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
    std::fs::read_to_string(path).unwrap_or_else(|_| panic!("no file {file}"))
}

/// The pages of the guide by name, with their files: the modules of `guide`, and the crate page.
fn pages() -> Vec<(String, Vec<String>)> {
    let root = text("src/lib.rs");
    let (page, rest) = root.split_once("pub mod guide {").expect("the guide");
    let files = page.split("include_str!(\"").skip(1).filter_map(|rest| rest.split_once('"'));
    let files = files.map(|(file, _)| format!("src/{file}")).collect();
    let (_, rest) = rest.split_once("pages! {\n").expect("the pages");
    let names = rest.split('}').next().unwrap_or_default().split_whitespace();
    let pages = names.map(|name| (name.to_owned(), vec![format!("src/docs/{name}.md")]));
    std::iter::once(("guide".to_owned(), files)).chain(pages).collect()
}

/// Returns a page of the guide; of the crate page, the part after the README.
pub(super) fn read(name: &str) -> String {
    let page = pages().into_iter().find(|(page, _)| page == name);
    let (_, files) = page.unwrap_or_else(|| panic!("no page {name}"));
    files.iter().filter(|file| file.starts_with("src/docs/")).map(|file| text(file)).collect()
}

fn texts() -> impl Iterator<Item = (String, String)> {
    pages().into_iter().map(|(page, _)| (page.clone(), read(&page)))
}

/// The pages, and the proofs in `docs`.
fn pages_and_proofs() -> impl Iterator<Item = (String, String)> {
    let file = "docs/guarantees.md";
    texts().chain([(file.to_owned(), text(file))])
}

/// The anchors of the headings of a page.
pub(super) fn sections(text: &str) -> Vec<String> {
    let is_heading = |line: &&str| line.starts_with('#') && !line.starts_with("#[");
    let anchor = |heading: &str| {
        let letters = heading.trim_start_matches('#').trim().to_lowercase();
        let letters =
            letters.chars().filter(|char| char.is_alphanumeric() || "- _".contains(*char));
        letters.collect::<String>().replace(' ', "-")
    };
    text.lines().filter(is_heading).map(anchor).collect()
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The files of a folder, and of the folders in it.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

/// The Rust files of a folder of the repository, with their texts.
pub(super) fn sources(folder: &str) -> impl Iterator<Item = (PathBuf, String)> {
    let files = files(&root().join(folder)).into_iter();
    let files = files.filter(|path| path.extension().is_some_and(|end| end == "rs"));
    files.map(|path| (path.clone(), std::fs::read_to_string(path).unwrap()))
}

/// rustdoc checks the item of a link, and not the section.
#[test]
fn links_lead_to_sections_that_exist() {
    let files = files(&root().join("src"));
    let files: Vec<_> =
        files.iter().map(|path| (path, std::fs::read_to_string(path).unwrap())).collect();
    let crate_page = text("README.md") + &read("guide");
    let of_items: Vec<_> =
        files.iter().map(|(_, source)| sections(&without_marks(source))).collect();
    for (path, source) in &files {
        let page = pages().into_iter().find(|(_, files)| files.iter().any(|it| path.ends_with(it)));
        for target in targets(source).filter(|target| !target.starts_with("http")) {
            let Some((place, wanted)) = target.split_once('#') else { continue };
            let there = match (place, place.split_once("guide::")) {
                ("crate", _) => sections(&crate_page),
                ("", _) if path.ends_with("src/docs/guide.md") => sections(&crate_page),
                (_, Some((_, name))) => sections(&read(name)),
                ("", _) if page.is_some() => sections(&read(&page.as_ref().unwrap().0)),
                // The section of an item.
                _ => of_items.concat(),
            };
            let found = there.iter().any(|section| section == wanted);
            assert!(found, "{}: no section `{target}`", path.display());
        }
    }
}

/// Returns where the links lead.
fn targets(text: &str) -> impl Iterator<Item = &str> {
    text.split("](").skip(1).map(|rest| rest.split(')').next().unwrap_or_default())
}

/// Returns the lines without the marks of documentation.
fn without_marks(source: &str) -> String {
    let lines = source.lines().map(str::trim_start);
    let lines = lines.map(|line| line.trim_start_matches("///").trim_start_matches("//!").trim());
    lines.collect::<Vec<_>>().join("\n")
}

/// rustdoc does not check `docs`.
#[test]
fn links_in_docs_lead_to_files_and_sections_that_exist() {
    for page in ["guarantees.md", "comparison.md", "judge.md"] {
        for target in targets(&text(&format!("docs/{page}"))) {
            if target.starts_with("http") {
                continue;
            }
            let (file, wanted) = target.split_once('#').unwrap_or((target, ""));
            let file = format!("docs/{}", if file.is_empty() { page } else { file });
            assert!(root().join(&file).exists(), "no {file}");
            let leads = wanted.is_empty() || sections(&text(&file)).iter().any(|it| it == wanted);
            assert!(leads, "{page}: no `{target}`");
        }
    }
}

/// Whoever sets up an alert copies the name from a page.
#[test]
fn metrics_on_the_pages_exist() {
    let observe =
        [include_str!("../../src/observe/metrics.md"), include_str!("../../inbox/src/metrics.md")];
    let is_name = |char: char| char.is_ascii_lowercase() || char == '_';
    for (page, text) in pages_and_proofs() {
        for rest in text.split("`tower_dedup_").skip(1) {
            let name: String = rest.chars().take_while(|char| is_name(*char)).collect();
            let row = format!("| `tower_dedup_{name}` |");
            // The crate, and the target of its records.
            let documented = name == "inbox" || observe.iter().any(|table| table.contains(&row));
            assert!(documented, "{page}: no metric tower_dedup_{name}");
        }
    }
}
