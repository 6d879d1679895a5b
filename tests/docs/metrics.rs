//! The table of metrics in `observe` equals the names in the code.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};

use crate::records::code;

const METRICS: &str = include_str!("../../src/observe/metrics.md");

fn names(text: &str) -> BTreeSet<&str> {
    text.split(|char: char| !(char.is_ascii_alphanumeric() || char == '_'))
        .filter(|word| word.starts_with("tower_dedup_"))
        .collect()
}

/// The name and the kind in each row of the table of metrics.
fn rows() -> BTreeMap<String, String> {
    METRICS
        .lines()
        .skip(2)
        .map(|row| {
            let cells: Vec<&str> = row.split('|').map(str::trim).collect();
            (cells[1].trim_matches('`').to_owned(), cells[2].to_owned())
        })
        .collect()
}

/// Collects the kind of each metric that is described, its unit and its text.
#[derive(Default)]
struct Described(Mutex<Descriptions>);

/// The kind, the unit and the text of each metric.
type Descriptions = BTreeMap<String, (&'static str, Option<Unit>, String)>;

impl Described {
    fn add(&self, kind: &'static str, name: &KeyName, unit: Option<Unit>, text: &SharedString) {
        let is_known =
            self.0.lock().unwrap().insert(name.as_str().to_owned(), (kind, unit, text.to_string()));
        assert!(is_known.is_none(), "{} is described twice", name.as_str());
    }
}

impl Recorder for Described {
    fn describe_counter(&self, name: KeyName, unit: Option<Unit>, text: SharedString) {
        self.add("counter", &name, unit, &text);
    }

    fn describe_gauge(&self, name: KeyName, unit: Option<Unit>, text: SharedString) {
        self.add("gauge", &name, unit, &text);
    }

    fn describe_histogram(&self, name: KeyName, unit: Option<Unit>, text: SharedString) {
        self.add("histogram", &name, unit, &text);
    }

    fn register_counter(&self, _: &Key, _: &Metadata<'_>) -> Counter {
        Counter::noop()
    }

    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

#[test]
fn documented_metrics_are_the_described_metrics_and_those_that_are_emitted() {
    let described = Described::default();
    metrics::with_local_recorder(&described, tower_dedup::observe::describe_metrics);
    let described = described.0.into_inner().unwrap();
    let kinds = described.iter().map(|(name, (kind, ..))| (name.clone(), (*kind).to_owned()));
    assert_eq!(rows(), kinds.collect());
    for (name, (kind, unit, _text)) in &described {
        let expected = match name.rsplit('_').next().unwrap() {
            "seconds" => Unit::Seconds,
            "bytes" => Unit::Bytes,
            _ => Unit::Count,
        };
        assert_eq!(*unit, Some(expected), "{name}");
        assert_eq!(name.ends_with("_total"), *kind == "counter", "{name}");
    }
    let emitting: String = code("src/observe")
        .into_iter()
        .filter(|code| !code.contains("describe_counter!"))
        .collect();
    let described: BTreeSet<&str> = described.keys().map(String::as_str).collect();
    assert_eq!(described, names(&emitting));
}

#[test]
fn every_histogram_has_recommended_buckets() {
    let rows = rows();
    let histograms: BTreeSet<&str> = rows
        .iter()
        .filter(|(_, kind)| *kind == "histogram")
        .map(|(name, _)| name.as_str())
        .collect();
    let all = tower_dedup::observe::metrics_buckets();
    assert!(all.iter().all(|(_, buckets)| buckets.is_sorted()));
    assert_eq!(histograms, all.iter().map(|(name, _)| *name).collect());
}
