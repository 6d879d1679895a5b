//! [`Verdicts`] of the judge on one receiver, and the table of all.

use std::fmt::Write;

use serde_json::Value;

use crate::receivers::CASES;

/// The lines of `--json`, in the order of the trials.
#[derive(Debug)]
pub(crate) struct Verdicts(Vec<Value>);

impl Verdicts {
    pub(crate) fn read(output: &[u8]) -> Self {
        let lines = serde_json::Deserializer::from_slice(output).into_iter();
        Self(lines.collect::<Result<_, _>>().unwrap())
    }

    /// Returns the trials with this verdict.
    pub(crate) fn are(&self, verdict: &str) -> impl Iterator<Item = &str> {
        let lines = self.0.iter().filter(move |line| line["verdict"] == verdict);
        lines.filter_map(|line| line["trial"].as_str())
    }

    /// Returns the verdict of this trial, and why.
    pub(crate) fn evidence(&self, trial: &str) -> String {
        match self.0.iter().find(|line| line["trial"] == trial) {
            Some(line) => {
                format!("{}: {} ({} s)", line["verdict"], line["evidence"], line["seconds"])
            }
            None => "there is no such trial".to_owned(),
        }
    }
}

pub(crate) fn written(judged: &[Verdicts]) -> String {
    let mut table = String::new();
    for (case, verdicts) in CASES.iter().zip(judged) {
        writeln!(table, "{}", case.0.name()).unwrap();
        for line in &verdicts.0 {
            let trial = line["trial"].as_str().unwrap();
            writeln!(table, "    {trial:<24} {}", verdicts.evidence(trial)).unwrap();
        }
    }
    table
}
