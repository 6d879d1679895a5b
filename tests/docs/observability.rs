//! `examples/observability`: Prometheus accepts the alerts and the dashboard's queries, and every name in
//! them is documented.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::guide::{read, sections};

/// Labels of Prometheus itself.
const SCRAPED: [&str; 3] = ["job", "instance", "le"];

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/observability")
}

fn file(name: &str) -> String {
    std::fs::read_to_string(folder().join(name)).unwrap()
}

/// Runs `promtool` in a folder. Panics if it is missing, because a skipped test looks like a passed one.
fn promtool(folder: &Path, arguments: &[&str]) {
    let output = match Command::new("promtool").args(arguments).current_dir(folder).output() {
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
fn promtool_accepts_alerts_and_configuration() {
    promtool(&folder(), &["check", "rules", "--lint=all", "--lint-fatal", "alerts.yml"]);
    promtool(&folder(), &["check", "config", "--lint=all", "--lint-fatal", "prometheus.yml"]);
}

#[test]
fn alerts_fire_on_their_series_and_on_no_other() {
    promtool(&folder(), &["test", "rules", "alerts.test.yml"]);
}

/// A metric as the table in `observe` documents it.
struct Metric {
    kind: String,
    labels: Vec<String>,
    /// The words in backticks of its meaning, among them the values of its labels.
    words: Vec<String>,
}

/// The words in backticks.
fn words(text: &str) -> Vec<String> {
    text.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

/// The cells of the table of metrics.
fn table() -> Vec<Vec<String>> {
    let rows = include_str!("../../src/observe/metrics.md").lines().skip(2);
    rows.map(|row| row.split('|').skip(1).map(|cell| cell.trim().to_owned()).collect()).collect()
}

/// The names of the outcomes, as they are defined: `Completed = "completed" INFO,`.
fn outcomes() -> Vec<String> {
    let table = include_str!("../../src/observe/endings.rs");
    let (outcomes, _) = table.split_once("\nanswers! {").expect("the outcomes, then the answers");
    let names = outcomes.split(" = \"").skip(1);
    names.map(|rest| rest.split('"').next().unwrap().to_owned()).collect()
}

fn documented() -> BTreeMap<String, Metric> {
    let outcomes = outcomes();
    let mut metrics = BTreeMap::new();
    for row in table() {
        let (labels, mut values) = (words(&row[2]), words(&row[3..].join("|")));
        if labels.iter().any(|label| label == "outcome") {
            values.extend(outcomes.clone());
        }
        let metric = Metric { kind: row[1].clone(), labels, words: values };
        metrics.insert(words(&row[0]).remove(0), metric);
    }
    assert!(metrics.len() >= 18, "only {} metrics: has the table moved?", metrics.len());
    metrics
}

/// An expression of Prometheus, and the labels that its text or legend names.
struct Query {
    place: String,
    expr: String,
    shown: Vec<String>,
}

/// The expressions of `alerts.yml`, by the name of their alert.
fn alerts() -> Vec<Query> {
    let text = file("alerts.yml");
    let blocks = text.split("- alert: ").skip(1);
    let queries = blocks.map(|block| {
        let (name, rest) = block.split_once('\n').unwrap();
        let (_, rest) = rest.split_once("expr: ").unwrap();
        let (expr, rest) = rest.split_once("\n        labels:").unwrap();
        let expr = expr.split("\n        for: ").next().unwrap().trim_start_matches('|').trim();
        let shown = rest.split("$labels.").skip(1).map(|rest| identifier(rest).to_owned());
        Query { place: name.trim().to_owned(), expr: expr.to_owned(), shown: shown.collect() }
    });
    queries.collect()
}

/// The panels of the dashboard, without the headings of its rows.
fn panels() -> Vec<Value> {
    let dashboard: Value = serde_json::from_str(&file("dashboard.json")).unwrap();
    let mut panels = dashboard["panels"].as_array().unwrap().clone();
    panels.retain(|panel| panel["type"] != "row");
    assert!(panels.len() >= 25, "only {} panels", panels.len());
    panels
}

/// The expressions of the dashboard, by the title of their panel.
fn queries() -> Vec<Query> {
    let mut queries = Vec::new();
    for panel in panels() {
        for target in panel["targets"].as_array().unwrap() {
            let legend = target["legendFormat"].as_str().unwrap();
            let shown = legend.split("{{").skip(1).map(|rest| identifier(rest).to_owned());
            let place = format!("{} ({})", panel["title"], target["refId"]);
            let expr = target["expr"].as_str().unwrap().to_owned();
            queries.push(Query { place, expr, shown: shown.collect() });
        }
    }
    queries
}

/// The name that a text begins with.
fn identifier(text: &str) -> &str {
    text.split(|char: char| !char.is_ascii_alphanumeric() && char != '_').next().unwrap()
}

/// The metrics of an expression, each with its matchers: label and value.
fn selectors(expr: &str) -> Vec<(String, Vec<(String, String)>)> {
    let mut selectors = Vec::new();
    for (at, _) in expr.match_indices("tower_dedup_") {
        let name = identifier(&expr[at..]);
        let rest = &expr[at + name.len()..];
        let inside = rest.strip_prefix('{').map_or("", |rest| rest.split('}').next().unwrap());
        let mut matchers = Vec::new();
        // A matcher is `label="value"`, so its parts stand between quotation marks in turn.
        let parts: Vec<&str> = inside.split('"').collect();
        for pair in parts.chunks_exact(2) {
            let label = pair[0].trim_matches([',', ' ', '=', '!', '~']);
            matchers.push((label.to_owned(), pair[1].to_owned()));
        }
        selectors.push((name.to_owned(), matchers));
    }
    assert!(!selectors.is_empty(), "no metric in {expr}");
    selectors
}

/// The documented metric of a name. A histogram has three series.
fn metric<'a>(name: &'a str, documented: &BTreeMap<String, Metric>) -> Option<&'a str> {
    let is_histogram = |name: &str| documented.get(name).map(|it| it.kind == "histogram");
    for suffix in ["_bucket", "_sum", "_count"] {
        if let Some(base) = name.strip_suffix(suffix)
            && is_histogram(base) == Some(true)
        {
            return Some(base);
        }
    }
    (is_histogram(name) == Some(false)).then_some(name)
}

#[test]
fn names_and_labels_are_documented() {
    let documented = documented();
    let mut wrong = Vec::new();
    for Query { place, expr, shown } in alerts().into_iter().chain(queries()) {
        let mut known: BTreeSet<&str> = SCRAPED.into();
        for (name, matchers) in selectors(&expr) {
            let Some(base) = metric(&name, &documented) else {
                wrong.push(format!("{place}: no metric {name}"));
                continue;
            };
            let metric = &documented[base];
            known.extend(metric.labels.iter().map(String::as_str));
            for (label, value) in matchers {
                if !SCRAPED.contains(&label.as_str()) && !metric.labels.contains(&label) {
                    wrong.push(format!("{place}: {name} has no label {label}"));
                }
                for value in value.split('|').filter(|value| !value.starts_with('$')) {
                    if !metric.words.iter().any(|word| word == value) {
                        wrong.push(format!("{place}: {name} has no value {label}={value}"));
                    }
                }
            }
        }
        for rest in expr.split(" by (").skip(1) {
            let by: Vec<&str> = rest.split(')').next().unwrap().split(", ").collect();
            for label in by.iter().filter(|label| !known.contains(*label)) {
                wrong.push(format!("{place}: no metric has the label {label}"));
            }
            for label in shown.iter().filter(|label| !by.contains(&label.as_str())) {
                wrong.push(format!("{place}: the label {label} is not in the result"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn dashboard_shows_every_metric() {
    let documented = documented();
    let names: Vec<String> =
        queries().iter().flat_map(|query| selectors(&query.expr)).map(|(name, _)| name).collect();
    let shown: BTreeSet<&str> = names.iter().filter_map(|name| metric(name, &documented)).collect();
    let missing: Vec<_> = documented.keys().filter(|name| !shown.contains(name.as_str())).collect();
    assert!(missing.is_empty(), "not on the dashboard: {missing:?}");
}

/// Without series every query of the dashboard has no result. One that Prometheus cannot parse is an error.
#[test]
fn promtool_accepts_the_queries_of_the_dashboard() {
    let checks = queries().into_iter().map(|query| {
        let expr = query.expr.replace("$__rate_interval", "5m");
        let expr = expr.replace("$job", ".*").replace("$namespace", ".*");
        json!({ "eval_time": "30m", "expr": format!("absent({expr}) == 2"), "exp_samples": [] })
    });
    let test = json!({ "interval": "1m", "promql_expr_test": checks.collect::<Vec<_>>() });
    let tests = json!({ "rule_files": [], "tests": [test] });
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("queries.json"), tests.to_string()).unwrap();
    promtool(dir.path(), &["test", "rules", "queries.json"]);
}

#[test]
fn every_alert_has_a_test_in_which_it_fires() {
    let tests = file("alerts.test.yml");
    for Query { place, .. } in alerts() {
        assert!(tests.contains(&format!("alertname=\"{place}\"")), "{place} has no test");
    }
}

/// At night, the name of the alert is all that one has.
#[test]
fn every_alert_leads_to_a_section_and_has_a_row_on_the_incident_page() {
    let incidents = read("incidents");
    let (_, rows) = incidents.split_once("| you see | alert |").expect("the table of alerts");
    let rows = rows.lines().skip(2).take_while(|line| line.starts_with('|'));
    let listed: BTreeSet<String> =
        rows.flat_map(|row| words(row.split('|').nth(2).unwrap())).collect();
    let names: BTreeSet<String> = alerts().into_iter().map(|query| query.place).collect();
    assert_eq!(listed, names, "the rows of the incident page and alerts.yml");
    let text = file("alerts.yml");
    let mut links = 0;
    for rest in text.split("runbook_url: ").skip(1) {
        let url = rest.lines().next().unwrap();
        let path = url.strip_prefix("https://docs.rs/tower-dedup/latest/tower_dedup/guide/");
        let (page, section) = path.unwrap().split_once("/index.html#").unwrap();
        assert!(sections(&read(page)).iter().any(|it| it == section), "no section {url}");
        links += 1;
    }
    assert_eq!(links, names.len(), "each alert has a link");
}
