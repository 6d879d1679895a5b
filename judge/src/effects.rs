//! [`Counter`]: how often each event took effect.

use std::process::Stdio;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, StatusCode};
use serde_json::Value;
use tokio::time::timeout;

use crate::target::Target;
use crate::wire::{self, Connection};

/// How long one count may take.
const BOUND: Duration = Duration::from_secs(15);

/// Where the counts come from.
#[derive(Debug)]
pub(crate) enum Counter {
    Command(String),
    Url(Target),
}

/// Ids and how often each took effect.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Counts(Vec<(String, u64)>);

impl Counts {
    /// Returns the effects of the ids that contain this one: the key of a receiver may have more parts.
    pub(crate) fn of(&self, id: &str) -> u64 {
        self.0.iter().filter(|(counted, _)| counted.contains(id)).map(|(_, count)| count).sum()
    }
}

impl Counter {
    pub(crate) async fn read(&self) -> Result<Counts, String> {
        match self {
            Self::Command(command) => {
                let output =
                    timeout(BOUND, crate::process::shell(command).stderr(Stdio::piped()).output());
                let output = output.await.map_err(|_| "--count does not end".to_owned())?;
                let output = output.map_err(|error| format!("--count does not run: {error}"))?;
                if !output.status.success() {
                    let said = String::from_utf8_lossy(&output.stderr);
                    return Err(format!("--count failed ({}): {}", output.status, said.trim()));
                }
                lines(&String::from_utf8_lossy(&output.stdout))
            }
            Self::Url(target) => {
                let request = Request::get(&target.path).body(Bytes::new());
                let request = request.map_err(|error| format!("--count-url: {error}"))?;
                let connection = Connection::open(target, &wire::whole(target, &request)).await;
                match connection.answer().await.0 {
                    Ok((StatusCode::OK, body)) => list(&body),
                    Ok((status, _)) => Err(format!("--count-url is answered {status}")),
                    Err(why) => Err(format!("--count-url: {why}")),
                }
            }
        }
    }
}

/// Reads lines `id count`, with a space, tab, comma or `|` between. An id may contain these, too.
fn lines(text: &str) -> Result<Counts, String> {
    let read = |line: &str| {
        // The id may be empty.
        let (id, count) = line.trim_end().rsplit_once([' ', '\t', ',', '|'])?;
        let id = id.trim_start().trim_end_matches([' ', '\t', ',', '|']);
        Some((id.to_owned(), count.parse().ok()?))
    };
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    let counts = lines
        .map(|line| read(line).ok_or_else(|| format!("--count printed `{line}`, not `ID COUNT`")));
    counts.collect::<Result<_, _>>().map(Counts)
}

/// Reads a list of objects with `id` and `count`.
fn list(body: &[u8]) -> Result<Counts, String> {
    let read = |object: &Value| {
        let id = match &object["id"] {
            Value::String(id) => id.clone(),
            Value::Number(id) => id.to_string(),
            _ => return None,
        };
        Some((id, object["count"].as_u64()?))
    };
    let list: Option<Value> = serde_json::from_slice(body).ok();
    let list = list.as_ref().and_then(Value::as_array);
    let counts = list.and_then(|list| list.iter().map(read).collect::<Option<_>>());
    counts.map(Counts).ok_or_else(|| r#"--count-url gives no list of {"id", "count"}"#.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_read_with_each_separator_and_composed_ids() {
        let text = "a 1\nb|c|2\n\n d , 3 \ne\t4\n 5\n|6\n";
        let counts = lines(text).unwrap();
        let expected = [("a", 1), ("b|c", 2), ("d", 3), ("e", 4), ("", 5), ("", 6)];
        assert_eq!(counts.0, expected.map(|(id, count)| (id.to_owned(), count)));
        assert_eq!((counts.of("c"), counts.of("x"), counts.of("")), (2, 0, 21));
        assert!(lines("a\n").is_err() && lines("a b\n").is_err());
        let json = br#"[{"id":"a","count":1,"namespace":"n"},{"id":7,"count":2}]"#;
        assert_eq!(list(json).unwrap().0, [("a".to_owned(), 1), ("7".to_owned(), 2)]);
        assert!(list(br#"{"a":1}"#).is_err() && list(br#"[{"id":"a"}]"#).is_err());
    }
}
