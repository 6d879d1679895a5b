//! The tables of metrics and records have what the code emits. `examples/observability`: Prometheus accepts the alerts and the
//! dashboard's queries, and every name in them is in the table.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::guide::{read, sections, sources};

/// Labels of Prometheus itself.
const SCRAPED: [&str; 3] = ["job", "instance", "le"];

/// The tables of the crate and of the inbox.
const METRICS: [&str; 2] =
    [include_str!("../../src/observe/metrics.md"), include_str!("../../inbox/src/metrics.md")];

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/observability")
}

fn file(name: &str) -> String {
    std::fs::read_to_string(folder().join(name)).unwrap()
}

/// Runs `promtool` in a folder. Panics if it is missing, because a skipped test looks like a passed one.
fn promtool(folder: &Path, arguments: &[&str]) {
    let mut promtool = Command::new("promtool");
    // It collects its garbage for a third of its time, else.
    promtool.args(arguments).current_dir(folder).env("GOGC", "400");
    let output = match promtool.output() {
        Ok(output) => output,
        Err(error) if error.kind() == ErrorKind::NotFound => panic!(
            "promtool is missing: install prometheus (Debian, Homebrew) or golang-github-prometheus (Fedora)"
        ),
        Err(error) => panic!("promtool: {error}"),
    };
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(output.status.success(), "promtool {arguments:?}: {said}");
}

#[test]
#[ignore = "it needs promtool: scripts/check runs it"]
fn promtool_accepts_alerts_and_configuration() {
    promtool(&folder(), &["check", "rules", "--lint=all", "--lint-fatal", "alerts.yml"]);
    promtool(&folder(), &["check", "config", "--lint=all", "--lint-fatal", "prometheus.yml"]);
}

#[test]
#[ignore = "it needs promtool: scripts/check runs it"]
fn alerts_fire_on_their_series_and_on_no_other() {
    promtool(&folder(), &["test", "rules", "alerts.test.yml"]);
}

/// It needs two weeks of series, so it runs beside the others.
#[test]
#[ignore = "it needs promtool: scripts/check runs it"]
fn silence_of_a_sender_is_measured_by_its_own_past() {
    promtool(&folder(), &["test", "rules", "silence.test.yml"]);
}

/// The words in backticks.
fn words(text: &str) -> Vec<String> {
    text.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

/// The documented metrics, and the kind of each.
fn documented() -> BTreeMap<String, String> {
    let rows = METRICS.iter().flat_map(|table| table.lines().skip(2));
    let rows = rows.map(|row| row.split('|').collect::<Vec<_>>());
    rows.map(|row| (words(row[1]).remove(0), row[2].trim().to_owned())).collect()
}

/// Returns the code of the Rust files of `folder`, without comments and in one line each.
fn code(folder: &str) -> Vec<String> {
    let code = |(_, source): (PathBuf, String)| {
        let code = source.lines().filter(|line| !line.trim_start().starts_with("//"));
        code.flat_map(str::split_whitespace).collect::<Vec<_>>().join(" ")
    };
    sources(folder).map(code).collect()
}

/// The table of records is made from their definitions.
#[test]
fn only_observe_emits_records() {
    let all = code("src");
    let mut records = Vec::new();
    for source in &all {
        for rest in source.split("tracing::").skip(1) {
            let Some((level, rest)) = rest.split_once("!(") else { continue };
            if ["error", "warn", "info", "debug", "trace", "event", "$level"].contains(&level) {
                let target = rest.trim_start().split(',').next();
                assert_eq!(target, Some("target: \"tower_dedup\""), "{rest:.80}");
                records.push(level);
            }
        }
    }
    records.sort_unstable();
    // The macro `records` of `observe/records.rs`, and the record of a delivery.
    assert_eq!(records, ["$level", "event"], "a record that is not in the table");
}

/// The descriptions are made from the table, and the tests of the layer find a metric that is not described.
#[test]
fn documented_metrics_are_those_that_are_emitted() {
    let emitting = [code("src/observe"), code("inbox/src")].concat().join(" ");
    let words = emitting.split(|char: char| !(char.is_ascii_alphanumeric() || char == '_'));
    let emitted: BTreeSet<_> = words
        // The target of the inbox's records.
        .filter(|word| word.starts_with("tower_dedup_") && *word != "tower_dedup_inbox")
        .collect();
    let documented = documented();
    assert!(documented.keys().eq(emitted));
    for (name, kind) in &documented {
        assert!(["counter", "gauge", "histogram"].contains(&&**kind), "{name}: {kind}");
        assert_eq!(name.ends_with("_total"), kind == "counter", "{name}");
    }
}

#[test]
fn every_histogram_has_recommended_buckets() {
    let histograms = documented().into_iter().filter(|(_, kind)| kind == "histogram");
    let histograms: BTreeSet<_> = histograms.map(|(name, _)| name).collect();
    let all = tower_dedup::observe::metrics_buckets();
    assert!(all.iter().all(|(_, buckets)| buckets.is_sorted()));
    assert_eq!(histograms, all.iter().map(|(name, _)| (*name).to_owned()).collect());
}

/// The labels and their values that are documented. Those of outcomes are where they are defined: `Completed =
/// "completed" INFO,`.
fn labels_and_values() -> BTreeSet<String> {
    let endings = include_str!("../../src/observe/endings.rs");
    let (_, outcomes) = endings.split_once("\nendings! {").expect("the list");
    let outcomes = outcomes.split(" = \"").skip(1).map(|rest| rest.split('"').next().unwrap());
    let known = outcomes.chain(SCRAPED).map(str::to_owned);
    known.chain(METRICS.iter().flat_map(|table| words(table))).collect()
}

/// The expressions of the dashboard.
fn queries() -> Vec<String> {
    let dashboard: Value = serde_json::from_str(&file("dashboard.json")).unwrap();
    let panels = dashboard["panels"].as_array().unwrap().iter();
    let targets = panels.filter_map(|panel| panel["targets"].as_array()).flatten();
    targets.map(|target| target["expr"].as_str().unwrap().to_owned()).collect()
}

/// The names of the alerts.
fn alerts() -> BTreeSet<String> {
    let text = file("alerts.yml");
    text.split("- alert: ").skip(1).map(|rest| rest.lines().next().unwrap().to_owned()).collect()
}

/// The metrics in a text, each with what stands in its braces. A histogram has three series.
fn selectors(text: &str) -> Vec<(String, String)> {
    let documented = documented();
    let starts = text.match_indices("tower_dedup_").map(|(at, _)| &text[at..]);
    let selectors = starts.map(|rest| {
        let is_name = |char: char| char.is_ascii_alphanumeric() || char == '_';
        let (name, rest) = rest.split_at(rest.find(|char| !is_name(char)).unwrap_or(rest.len()));
        let series = ["_bucket", "_sum", "_count"];
        let base = series.iter().find_map(|suffix| name.strip_suffix(suffix));
        let base = base
            .filter(|base| documented.get(*base).is_some_and(|kind| kind == "histogram"))
            .unwrap_or(name);
        let inside = rest.strip_prefix('{').map_or("", |rest| rest.split('}').next().unwrap());
        (base.to_owned(), inside.to_owned())
    });
    selectors.collect()
}

#[test]
fn metrics_labels_and_values_are_documented_and_the_dashboard_shows_every_metric() {
    let (documented, known) = (documented(), labels_and_values());
    let shown = selectors(&queries().join("\n"));
    for (name, inside) in shown.iter().cloned().chain(selectors(&file("alerts.yml"))) {
        assert!(documented.contains_key(&name), "no metric {name}");
        // A matcher is `label="value"`, so labels and values stand between quotation marks in turn.
        for word in inside.split(['"', '|', ',', ' ', '=', '!', '~']) {
            let is_known = word.is_empty() || word.starts_with('$') || known.contains(word);
            assert!(is_known, "{name}: {word}");
        }
    }
    let shown: BTreeSet<_> = shown.into_iter().map(|(name, _)| name).collect();
    assert_eq!(shown, documented.into_keys().collect(), "the dashboard shows every metric");
}

/// Without series every query of the dashboard has no result. One that Prometheus cannot parse is an error.
#[test]
#[ignore = "it needs promtool: scripts/check runs it"]
fn promtool_accepts_the_queries_of_the_dashboard() {
    let checks = queries().into_iter().map(|expr| {
        let expr = expr.replace("$__rate_interval", "5m");
        let expr = expr.replace("$job", ".*").replace("$namespace", ".*");
        json!({ "eval_time": "30m", "expr": format!("absent({expr}) == 2"), "exp_samples": [] })
    });
    let test = json!({ "interval": "1m", "promql_expr_test": checks.collect::<Vec<_>>() });
    let tests = json!({ "rule_files": [], "tests": [test] });
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("queries.json"), tests.to_string()).unwrap();
    promtool(dir.path(), &["test", "rules", "queries.json"]);
}

/// At night, the name of the alert is all that one has.
#[test]
fn every_alert_fires_in_a_test_and_leads_to_a_section_and_to_a_row_of_the_incident_page() {
    let (alerts, tests) = (alerts(), file("alerts.test.yml") + &file("silence.test.yml"));
    for alert in &alerts {
        assert!(tests.contains(&format!("alertname=\"{alert}\"")), "{alert} has no test");
    }
    let incidents = read("incidents");
    let (_, rows) = incidents.split_once("| you see | alert |").expect("the table of alerts");
    let rows = rows.lines().skip(2).take_while(|line| line.starts_with('|'));
    let listed: BTreeSet<String> =
        rows.flat_map(|row| words(row.split('|').nth(2).unwrap())).collect();
    assert_eq!(listed, alerts, "the rows of the incident page and alerts.yml");
    let text = file("alerts.yml");
    let urls: Vec<_> = text.split("runbook_url: ").skip(1).collect();
    assert_eq!(urls.len(), alerts.len(), "each alert has a link");
    for url in urls.into_iter().map(|rest| rest.lines().next().unwrap()) {
        let path = url.strip_prefix("https://docs.rs/tower-dedup/latest/tower_dedup/guide/");
        let (page, section) = path.unwrap().split_once("/index.html#").unwrap();
        assert!(sections(&read(page)).iter().any(|it| it == section), "no section {url}");
    }
}
