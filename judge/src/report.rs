//! The lines of a verdict on stdout.

use std::io::{self, Write};
use std::time::Duration;

use serde_json::json;

use crate::judge::{Shown, Stop};
use crate::trial::Trial;

/// Prints a line of the table, or an object. A closed stdout is no error: the exit code has the answer.
pub(crate) fn print(
    trial: &Trial,
    shown: &Shown,
    took: Duration,
    has_effects: bool,
    is_json: bool,
) {
    let Trial { name, sent, right, look_up, .. } = trial;
    let (verdict, evidence) = match shown {
        Ok(evidence) => ("pass", evidence),
        Err(Stop::Fail(evidence)) => ("fail", evidence),
        Err(Stop::Unknown(evidence) | Stop::Cut(evidence)) => ("unknown", evidence),
    };
    let evidence = printable(evidence);
    if is_json {
        let object = json!({
            "trial": name,
            "verdict": verdict,
            "by": if has_effects { "answers and effects" } else { "answers" },
            "evidence": evidence,
            "sent": sent,
            "right": right,
            "look_up": look_up,
            "seconds": (took.as_secs_f64() * 1000.0).round() / 1000.0,
        });
        return say(&object.to_string());
    }
    let (verdict, by) = match verdict {
        "unknown" => ("cannot tell", ""),
        _ => (verdict, if has_effects { "" } else { " (by answers only)" }),
    };
    say(&format!("{name:<24}  {verdict:<11}  {evidence}{by}"));
    if verdict == "fail" {
        let look_up = look_up.join("; ");
        say(&format!("    sent: {sent}\n    right: {right}\n    look up: {look_up}"));
    }
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
