//! [`Verdict`], and its lines on stdout.

use std::io::{self, Write};
use std::time::Duration;

use serde_json::json;

use crate::catalog::Trial;

/// What a trial has shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    Pass,
    Fail,
    /// The evidence does not suffice.
    Unknown,
}

impl Verdict {
    fn name(self) -> &'static str {
        match self {
            Self::Pass => "pass",
            Self::Fail => "fail",
            Self::Unknown => "unknown",
        }
    }

    fn in_words(self) -> &'static str {
        if self == Self::Unknown { "cannot tell" } else { self.name() }
    }
}

/// A verdict and the observations that it rests on.
#[derive(Debug)]
pub(crate) struct Finding {
    pub(crate) verdict: Verdict,
    /// In one line.
    pub(crate) evidence: String,
    /// No effects were seen.
    pub(crate) by_answers: bool,
    pub(crate) took: Duration,
}

/// Prints a line of the table, or an object. A closed stdout is no error: the exit code has the answer.
pub(crate) fn print(trial: &Trial, finding: &Finding, is_json: bool) {
    let Finding { verdict, evidence, by_answers, took } = finding;
    let evidence = printable(evidence);
    let mut text = if is_json {
        json!({
            "trial": trial.name,
            "verdict": verdict.name(),
            "by": if *by_answers { "answers" } else { "answers and effects" },
            "evidence": evidence,
            "sent": trial.sent,
            "right": trial.right,
            "look_up": trial.look_up,
            "seconds": (took.as_secs_f64() * 1000.0).round() / 1000.0,
        })
        .to_string()
    } else {
        let by =
            if *by_answers && *verdict != Verdict::Unknown { " (by answers only)" } else { "" };
        format!("{:<24}  {:<11}  {evidence}{by}", trial.name, verdict.in_words())
    };
    if !is_json && *verdict == Verdict::Fail {
        let Trial { sent, right, look_up, .. } = trial;
        text +=
            &format!("\n    sent: {sent}\n    right: {right}\n    look up: {}", look_up.join("; "));
    }
    say(&text);
}

/// Prints lines on stdout.
pub(crate) fn say(text: &str) {
    let _ = writeln!(io::stdout(), "{text}");
}

/// Prints a line on stderr.
pub(crate) fn tell(line: &str) {
    let _ = writeln!(io::stderr(), "{}", printable(line));
}

/// Escapes control characters, which come from outside, for a terminal.
fn printable(text: &str) -> String {
    let escape = |char: char| match char.is_control() {
        true => char.escape_default().to_string(),
        false => char.to_string(),
    };
    text.chars().map(escape).collect()
}
