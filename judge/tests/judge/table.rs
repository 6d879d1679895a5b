//! [`Verdicts`] of the judge on one receiver, and the table of all.

use std::fmt::Write;

use serde_json::Value;

use crate::receivers::{CASES, Case, Receiver};

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

    pub(crate) fn trials(&self) -> impl Iterator<Item = &str> {
        self.0.iter().filter_map(|line| line["trial"].as_str())
    }

    fn line(&self, trial: &str) -> Option<&Value> {
        self.0.iter().find(|line| line["trial"] == trial)
    }

    fn verdict(&self, trial: &str) -> &str {
        self.line(trial).and_then(|line| line["verdict"].as_str()).unwrap_or_default()
    }

    /// Returns the verdict of this trial, and why.
    pub(crate) fn evidence(&self, trial: &str) -> String {
        match self.line(trial) {
            Some(line) => {
                format!("{}: {} ({} s)", line["verdict"], line["evidence"], line["seconds"])
            }
            None => "there is no such trial".to_owned(),
        }
    }
}

/// Returns each verdict with its evidence.
pub(crate) fn evidence(judged: &[Verdicts]) -> String {
    let mut text = String::new();
    for (case, verdicts) in CASES.iter().zip(judged) {
        writeln!(text, "{}", case.0.name()).unwrap();
        for trial in verdicts.trials() {
            writeln!(text, "    {trial:<24} {}", verdicts.evidence(trial)).unwrap();
        }
    }
    text
}

/// Returns the tables of `docs/judge.md`: of the example `receiver`, and of those that are written by hand.
pub(crate) fn tables(judged: &[Verdicts]) -> [String; 2] {
    let is_ours = |case: &Case| matches!(case.0, Receiver::Ours { .. });
    let all = || CASES.iter().zip(judged);
    let ours: Vec<_> = all().filter(|(case, _)| is_ours(case)).collect();
    let by_hand: Vec<_> = all().filter(|(case, _)| !is_ours(case)).collect();
    [table(&ours), table(&by_hand)]
}

fn table(columns: &[(&Case, &Verdicts)]) -> String {
    let row = |first: &str, cells: Vec<String>| format!("| {first} | {} |\n", cells.join(" | "));
    let names = columns.iter().map(|(case, _)| case.0.name()).collect();
    let mut text =
        row("", names) + &row("---", vec!["---".to_owned(); columns.len()]).replace(' ', "");
    for trial in columns[0].1.trials() {
        let cell = |(_, verdicts): &(&Case, &Verdicts)| match verdicts.verdict(trial) {
            "pass" => "·".to_owned(),
            "fail" => "**fail**".to_owned(),
            "" => String::new(),
            _ => "–".to_owned(),
        };
        text += &row(&format!("`{trial}`"), columns.iter().map(cell).collect());
    }
    text
}
