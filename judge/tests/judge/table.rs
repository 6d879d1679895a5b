//! [`Verdicts`] of the judge on one receiver, and the table of all.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde_json::Value;

use crate::receivers::Case;

/// The verdict and the evidence of each trial.
#[derive(Debug)]
pub(crate) struct Verdicts(pub(crate) BTreeMap<String, (String, String)>);

impl Verdicts {
    /// Reads the lines of `--json`.
    pub(crate) fn read(output: &[u8]) -> Self {
        let lines = serde_json::Deserializer::from_slice(output).into_iter::<Value>();
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let trial = |line: serde_json::Result<Value>| {
            let line = line.unwrap();
            let evidence = format!("{} ({} s)", text(&line["evidence"]), line["seconds"]);
            (text(&line["trial"]), (text(&line["verdict"]), evidence))
        };
        Self(lines.map(trial).collect())
    }

    pub(crate) fn failed(&self) -> impl Iterator<Item = &str> {
        let failed = self.0.iter().filter(|(_, (verdict, _))| verdict == "fail");
        failed.map(|(trial, _)| &**trial)
    }
}

pub(crate) fn written(judged: &[(&Case, Verdicts)]) -> String {
    let mut table = String::new();
    for (case, verdicts) in judged {
        writeln!(table, "{}", case.name()).unwrap();
        for (trial, (verdict, evidence)) in &verdicts.0 {
            writeln!(table, "    {trial:<24} {verdict:<8} {evidence}").unwrap();
        }
    }
    table
}
