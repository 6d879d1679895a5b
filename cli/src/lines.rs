//! [`Lines`]: the lines of stdin. One that cannot be read is reported with its number, and those after it are read.

use std::io::{self, BufRead, Read, StdinLock};

use serde_json::json;

use crate::failure::Failure;
use crate::output::{Output, tell};

/// The longest line, in bytes: longer than an id that any layer takes.
const LONGEST: usize = 1_024 * 1_024;
/// How many bad lines are reported.
const REPORTED: u64 = 20;

pub(crate) struct Lines {
    stdin: StdinLock<'static>,
    output: Output,
    number: u64,
    /// How many lines could not be read.
    pub(crate) bad: u64,
}

impl Lines {
    pub(crate) fn of_stdin(output: Output) -> Self {
        Self { stdin: io::stdin().lock(), output, number: 0, bad: 0 }
    }

    /// Returns the next line that is not empty, without its end. Returns `None` after the last line.
    pub(crate) fn next_line(&mut self) -> Result<Option<String>, Failure> {
        let mut line = Vec::new();
        while self.read(&mut line).map_err(|error| Failure::file("stdin", &error))? {
            let text = match str::from_utf8(&line) {
                _ if line.len() > LONGEST => Err("is longer than 1 MiB"),
                Ok(text) => Ok(text.trim_end_matches(['\n', '\r', ' '])),
                Err(_) => Err("is not UTF-8"),
            };
            let is_first = self.number == 1;
            match text.map(|text| if is_first { text.trim_start_matches('\u{feff}') } else { text })
            {
                Ok("") => {}
                Ok(text) => return Ok(Some(text.to_owned())),
                Err(why) => self.report(why),
            }
        }
        Ok(None)
    }

    /// Reads the next line, and of one that is too long the begin. Returns `false` after the last line.
    fn read(&mut self, line: &mut Vec<u8>) -> io::Result<bool> {
        line.clear();
        let longest = LONGEST as u64 + 1;
        let read = self.stdin.by_ref().take(longest).read_until(b'\n', line)?;
        if read > LONGEST && !line.ends_with(b"\n") {
            self.stdin.skip_until(b'\n')?;
        }
        self.number += u64::from(read > 0);
        Ok(read > 0)
    }

    /// Reports that the line which was returned last cannot be read, and counts it.
    pub(crate) fn report(&mut self, why: &str) {
        self.bad += 1;
        let line = self.number;
        match self.bad {
            ..=REPORTED if self.output.json => {
                tell(&json!({ "line": line, "error": why }).to_string());
            }
            ..=REPORTED => tell(&format!("line {line} {why}")),
            _ => {}
        }
    }
}
