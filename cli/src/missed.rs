//! `missed`: which events of a list the store does not hold as complete.
//!
//! 1. The list is read and looked up in parts. Nothing of a part is kept, so a list may have any length.
//! 2. The output has the order of the list, and names an event as the list does.
//! 3. A line that cannot be read is reported, and the lines after it are looked up. The command fails at the end, because
//!    its answer is not whole.

use bytes::Bytes;
use http::Request;
use serde_json::Value;
use tower_dedup::adapter::maintenance::{Entry, MaintenanceAdapter};
use tower_dedup::key::{Extracted, KeyPart, RequestRef};
use tower_dedup::{BoxError, DedupKey, KeyExtractor, StoreErrorKind};

use crate::failure::Failure;
use crate::key::{Capture, find};
use crate::lines::Lines;
use crate::options::Missed;
use crate::output::{Members, Output, row};
use crate::store::Target;

/// How many keys are looked up at once.
const PART: usize = 4_096;
/// How many bytes of lines are read at once, about: a line may have the body of an event.
const PART_BYTES: usize = 8 << 20;
/// The store has no such key.
const UNKNOWN: &str = "unknown";
/// The data of the key is unreadable.
const UNREADABLE: &str = "unreadable";
/// What an event may be, in the order of the counts.
const STATES: [&str; 6] = ["complete", "in-flight", "lapsed", "released", UNKNOWN, UNREADABLE];

/// The name of an event.
struct Name {
    /// As the list has it.
    id: String,
    /// The line of JSON, if it is to be printed.
    line: Option<Value>,
}

struct Input<'a> {
    lines: Lines,
    namespace: &'a str,
    /// Without them, a line is an id.
    keys: Option<KeyExtractor>,
    /// A line is a captured request, not a body.
    is_captured: bool,
    output: Output,
}

/// Returns `false` if the store does not hold an event of the list as complete.
pub(crate) async fn missed(
    target: &Target,
    options: &Missed,
    output: Output,
) -> Result<bool, Failure> {
    let mut input = Input::new(options, output)?;
    let mut counts = [0_u64; STATES.len()];
    let look_up = async |store: &dyn MaintenanceAdapter| {
        loop {
            let (keys, names) = input.part()?;
            if keys.is_empty() {
                return Ok(());
            }
            for ((key, name), state) in keys.iter().zip(names).zip(states(store, &keys).await?) {
                // A state of a later version is none that is complete.
                let place = STATES.iter().position(|known| *known == state);
                counts[place.unwrap_or(STATES.len() - 1)] += 1;
                if place != Some(0) && !print(output, options, key, name, &state)? {
                    return Ok(());
                }
            }
        }
    };
    target.with(look_up).await?;
    let counted = STATES.iter().zip(counts).map(|(state, count)| (state.replace('-', "_"), count));
    let counted: Vec<_> = counted.map(|(state, count)| (state, count.into())).collect();
    let ids = ("ids".to_owned(), counts.iter().sum::<u64>().into());
    output.tell(&Members([vec![ids], counted].concat()));
    match input.lines.bad {
        0 => Ok(counts[1..].iter().all(|count| *count == 0)),
        bad => Err(Failure::usage(format!("{bad} lines could not be read"))),
    }
}

/// Returns the state of each key.
async fn states(store: &dyn MaintenanceAdapter, keys: &[DedupKey]) -> Result<Vec<String>, Failure> {
    let state = |entry: Option<Entry>| {
        entry.map_or_else(|| UNKNOWN.to_owned(), |entry| entry.state.to_string())
    };
    match store.get_many(keys).await {
        Err(error) if error.kind() == StoreErrorKind::Corrupt => {}
        entries => return Ok(entries?.into_iter().map(state).collect()),
    }
    // The error does not say which.
    let mut states = Vec::with_capacity(keys.len());
    for key in keys {
        states.push(match store.get(key).await {
            Err(error) if error.kind() == StoreErrorKind::Corrupt => UNREADABLE.to_owned(),
            entry => state(entry?),
        });
    }
    Ok(states)
}

/// Prints an event that is not complete. Returns `false` if the reader of stdout has gone.
fn print(
    output: Output,
    options: &Missed,
    key: &DedupKey,
    name: Name,
    state: &str,
) -> Result<bool, Failure> {
    let id = if output.hash_ids { output.id(key) } else { name.id };
    if output.json {
        let mut members = Members::from([
            ("namespace", key.namespace().into()),
            ("id", id.into()),
            ("state", state.into()),
        ]);
        members.0.extend(name.line.map(|line| ("line".to_owned(), line)));
        return output.print(&members);
    }
    if options.ids_only { row(&[&id]) } else { row(&[&id, state]) }
}

impl<'a> Input<'a> {
    fn new(options: &'a Missed, output: Output) -> Result<Self, Failure> {
        let namespace = &*options.namespace;
        DedupKey::new(namespace, "id").map_err(Failure::usage)?;
        let id = options.id.iter().cloned().reduce(KeyPart::and);
        let keys = match &options.preset {
            Some(preset) => Some(find(preset).map_err(Failure::usage)?.extractor()),
            None => id.map(|id| id.namespace(namespace)),
        };
        let keys = keys.map(|keys| keys.namespace(namespace).checked()).transpose();
        let (keys, is_captured) = (keys.map_err(Failure::usage)?, options.preset.is_some());
        Ok(Self { lines: Lines::of_stdin(output), namespace, keys, is_captured, output })
    }

    /// Reads the next lines. Returns the keys of their events, and their names. Empty after the last line.
    fn part(&mut self) -> Result<(Vec<DedupKey>, Vec<Name>), Failure> {
        let (mut keys, mut names, mut bytes) = (Vec::new(), Vec::new(), 0);
        while keys.is_empty() || (keys.len() < PART && bytes < PART_BYTES) {
            let Some(line) = self.lines.next_line()? else { break };
            match self.read(&line) {
                Ok(found) => {
                    bytes += line.len();
                    for (key, name) in found {
                        keys.push(key);
                        names.push(name);
                    }
                }
                Err(error) => self.lines.report(&format!("has no id: {error}")),
            }
        }
        Ok((keys, names))
    }

    /// Returns the events of a line. A request without an event, such as a handshake, has none.
    fn read(&self, line: &str) -> Result<Vec<(DedupKey, Name)>, BoxError> {
        let Some(keys) = &self.keys else {
            let key = DedupKey::new(self.namespace, line)?;
            return Ok(vec![(key, Name { id: line.to_owned(), line: None })]);
        };
        let (head, body) = match self.is_captured {
            true => serde_json::from_str::<Capture>(line)?.into_request()?,
            false => (Request::new(()).into_parts().0, Bytes::copy_from_slice(line.as_bytes())),
        };
        let shown = self.output.json && !self.output.hash_ids;
        let shown = shown.then(|| serde_json::from_str::<Value>(line)).transpose()?;
        match keys.extract(&RequestRef::new(&head, &body))? {
            Extracted::Keys(keys) => Ok(keys
                .events()
                .iter()
                .map(|event| {
                    let id = event.key().id().to_owned();
                    (event.key().clone(), Name { id, line: shown.clone() })
                })
                .collect()),
            Extracted::Bypass => Ok(Vec::new()),
            // `Extracted` is non-exhaustive; the only other variant is `Missing`.
            _ => Err("the key is missing".into()),
        }
    }
}
