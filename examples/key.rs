//! Prints the keys of a captured request.
//!
//! ```text
//! cargo run --example key -- stripe request.json
//! cargo run --example key -- github < request.json
//! cargo run --example key -- --list
//! cargo run --example key -- --table > src/docs/providers.md
//! ```
//!
//! A request is a JSON object: `method` (default POST), `url` (default `/`), `headers` (an object of
//! strings), and the body as `body_utf8` or `body_base64`. Other members are ignored. The output is
//! one line of JSON on stdout:
//!
//! | output | the request |
//! |---|---|
//! | `{"outcome":"key","key":"…"}` | carries one event |
//! | `{"outcome":"keys","keys":["…"]}` | is a multi-event delivery |
//! | `{"outcome":"bypass"}` | carries no event, or has a method by which the sender does not deliver |
//! | `{"outcome":"missing"}` | has no key |
//! | `{"outcome":"malformed","reason":"…"}` | has a malformed key |
//!
//! Keys are printed as they are stored, without their namespace. The exit code is 1 if the sender is
//! unknown or the request cannot be parsed.

use std::error::Error;
use std::fmt::Write as _;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;
use std::{fmt, fs};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use clap::Parser;
use http::header::{HeaderName, HeaderValue};
use http::{Method, Request, Uri, request};
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Serialize};
use tower_dedup::key::{Extracted, RequestRef};
use tower_dedup::provider::{self, Preset, Retries};

mod shared;

/// Prints the keys of a captured request.
#[derive(Debug, Parser)]
struct Options {
    /// The preset's name, or an alias.
    #[arg(required_unless_present_any = ["list", "table"])]
    provider: Option<String>,
    /// The captured request in JSON; `-` or no argument reads stdin.
    file: Option<PathBuf>,
    /// Lists the presets with their retention floors.
    #[arg(long, exclusive = true)]
    list: bool,
    /// Prints the guide's page of presets.
    #[arg(long, exclusive = true)]
    table: bool,
}

/// A captured request.
#[derive(Debug, Deserialize)]
struct Capture {
    method: Option<String>,
    url: Option<String>,
    headers: Option<Headers>,
    body_utf8: Option<String>,
    body_base64: Option<String>,
}

/// The headers in their order, with repeated names.
#[derive(Debug, Default)]
struct Headers(Vec<(String, String)>);

/// The output.
#[derive(Debug, Serialize)]
#[serde(tag = "outcome", rename_all = "lowercase")]
enum Outcome {
    Key { key: String },
    Keys { keys: Vec<String> },
    Bypass,
    Missing,
    Malformed { reason: String },
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", shared::in_one_line(&*error));
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    let text = match &options.provider {
        _ if options.list => list(),
        _ if options.table => table(),
        Some(name) => outcome_line(find(name)?, options.file.as_deref())?,
        None => return Err("no preset is given".into()),
    };
    Ok(io::stdout().write_all(text.as_bytes())?)
}

fn find(name: &str) -> Result<Preset, String> {
    provider::find(name).ok_or_else(|| {
        let known: Vec<_> = provider::ALL
            .iter()
            .flat_map(|preset| {
                std::iter::once(preset.name()).chain(preset.aliases().iter().copied())
            })
            .collect();
        format!("no preset is named {name:?}; the presets are {}", known.join(", "))
    })
}

fn outcome_line(preset: Preset, file: Option<&Path>) -> Result<String, Box<dyn Error>> {
    let file = file.filter(|file| *file != Path::new("-"));
    let name = file.map_or_else(|| "stdin".to_owned(), |file| file.display().to_string());
    let text = match file {
        Some(file) => fs::read(file),
        None => {
            let mut text = Vec::new();
            io::stdin().read_to_end(&mut text).map(|_| text)
        }
    };
    let text = text.map_err(|error| format!("{name}: {error}"))?;
    let capture: Capture =
        serde_json::from_slice(&text).map_err(|error| format!("{name}: {error}"))?;
    let (head, body) = capture.into_request().map_err(|error| format!("{name}: {error}"))?;
    Ok(serde_json::to_string(&outcome(preset, &head, &body))? + "\n")
}

impl Capture {
    /// Returns the request as a server sees it, with the target in origin form.
    fn into_request(self) -> Result<(request::Parts, Bytes), Box<dyn Error>> {
        let url: Uri = self.url.as_deref().filter(|url| !url.is_empty()).unwrap_or("/").parse()?;
        let target = url.path_and_query().map_or("/", |target| target.as_str());
        let method = self.method.as_deref().unwrap_or("POST").parse::<Method>()?;
        let mut request = Request::builder().method(method).uri(target).body(())?;
        for (name, value) in self.headers.unwrap_or_default().0 {
            let name = name.parse::<HeaderName>()?;
            request.headers_mut().append(name, HeaderValue::from_bytes(value.as_bytes())?);
        }
        let body = match (self.body_utf8, self.body_base64) {
            (Some(_), Some(_)) => {
                return Err("the request has both body_utf8 and body_base64".into());
            }
            (Some(text), None) => text.into(),
            (None, Some(base64)) => STANDARD.decode(base64)?.into(),
            (None, None) => Bytes::new(),
        };
        Ok((request.into_parts().0, body))
    }
}

fn outcome(preset: Preset, head: &request::Parts, body: &Bytes) -> Outcome {
    let delivers = |method| preset.methods().contains(method);
    // As in the layer: routers run the handler of GET for a HEAD.
    if !(delivers(&head.method) || head.method == Method::HEAD && delivers(&Method::GET)) {
        return Outcome::Bypass;
    }
    match preset.extractor().extract(&RequestRef::new(head, body)) {
        Ok(Extracted::Keys(keys)) if keys.is_multi_event() => {
            let ids = keys.events().iter().map(|event| event.key().id().to_owned());
            Outcome::Keys { keys: ids.collect() }
        }
        Ok(Extracted::Keys(keys)) => Outcome::Key { key: keys.first().id().to_owned() },
        Ok(Extracted::Bypass) => Outcome::Bypass,
        // `Extracted` is non-exhaustive; the only other variant is `Missing`.
        Ok(_) => Outcome::Missing,
        Err(error) => Outcome::Malformed { reason: error.to_string() },
    }
}

fn list() -> String {
    let mut text = String::new();
    for preset in provider::ALL {
        let names = [&[preset.name()], preset.aliases()].concat().join(", ");
        let floor = duration(preset.retention_floor());
        writeln!(text, "{names:<32} {floor:<18} {}", preset.floor_basis()).expect("a string");
    }
    text
}

/// Returns the guide's page: a table of all presets, and a section for each.
fn table() -> String {
    let mut text = String::from(PAGE_HEAD);
    for preset in provider::ALL {
        let (title, key) = (preset.title(), preset.key_in_words().replace('|', "\\|"));
        let facts = to_know(preset);
        writeln!(text, "| [{title}](#{}) | {key} | {facts} |", anchor(title)).expect("a string");
    }
    text.push_str(PAGE_RULES);
    for preset in provider::ALL {
        text.push_str(&section(preset));
    }
    text
}

/// Returns the third column of the table.
fn to_know(preset: &Preset) -> String {
    let mut facts = vec![match preset.retries() {
        Retries::Automatic => "retries".to_owned(),
        Retries::ConnectionFailure => "retries failed connections only".to_owned(),
        Retries::Never => "**never retries**".to_owned(),
        _ => "retries not documented".to_owned(),
    }];
    facts.push(format!("retention at least {}", duration(preset.retention_floor())));
    if let Some(bytes) = preset.max_body() {
        facts.push(format!("bodies up to {} MiB", bytes / (1024 * 1024)));
    }
    if !preset.signed_id() {
        facts.push("id not signed".to_owned());
    }
    if preset.answer_matters() {
        facts.push("reads the response".to_owned());
    }
    facts.join("; ")
}

/// Returns what the table leaves out.
fn section(preset: &Preset) -> String {
    let names = [&[preset.name()], preset.aliases()].concat();
    let names: Vec<_> = names.iter().map(|name| format!("`{name}`")).collect();
    let constant = preset.name().to_uppercase().replace('-', "_");
    let methods: Vec<_> = preset.methods().iter().map(Method::as_str).collect();
    let retries = match preset.retries() {
        Retries::Automatic => "yes",
        Retries::ConnectionFailure => "only after a failed connection",
        Retries::Never => "**never**",
        _ => "not documented",
    };
    // `box` is a reserved word.
    let test = preset.name().replace('-', "_").replace("box", "box_");
    let mut lines = vec![
        format!("[`{constant}`](crate::provider::{constant}), by name {}.\n", names.join(", ")),
        format!("- Methods: {}", methods.join(", ")),
        format!(
            "- Retention: at least {} ({})",
            duration(preset.retention_floor()),
            preset.floor_basis()
        ),
        format!("- Retries: {retries} ({})", preset.retries_how()),
        format!("- Id signed: {}", if preset.signed_id() { "yes" } else { "no" }),
    ];
    lines.extend(preset.max_body().map(|bytes| {
        format!("- Body: up to {} MiB ({})", bytes / (1024 * 1024), preset.max_body_basis())
    }));
    lines.extend(preset.event_type_in_words().map(|words| format!("- Event type: {words}")));
    lines.extend(preset.handshakes().map(|words| format!("- Handshakes: {words}")));
    lines.extend(preset.unverified().map(|words| format!("- Not verified: {words}")));
    lines.push(format!("- [Source]({}); test `{test}`", preset.source()));
    format!("\n# {}\n\n{}\n", preset.title(), lines.join("\n"))
}

/// Returns the id that rustdoc gives to a heading.
fn anchor(heading: &str) -> String {
    let heading = heading.to_lowercase().replace(' ', "-");
    heading.chars().filter(|char| char.is_alphanumeric() || *char == '-').collect()
}

const PAGE_HEAD: &str = "\
Every preset: its key, and what else to know about its sender.

1. If the sender has a preset, use it. [Other senders](crate::guide::senders) have a recipe.
2. If a sender **never** retries, every response other than 2xx loses an event: commit a job and respond
   at once, as in `examples/ack_fast.rs`.
3. If the id is not signed, an attacker can send a signed body again under another id. Add a
   [second identity](crate::guide::keys#an-id-that-is-not-signed).
4. If the sender reads the response, [replay](crate::guide::answers#a-response-that-matters) it to
   duplicates.

| sender | key | what to know |
|---|---|---|
";

const PAGE_RULES: &str = "
- **Key**: header names, form fields, and JSON pointers into the body, or into the event after *each*.
  `?` marks a part that may be missing, and `|` joins parts.
- **Retention**: how long the sender may deliver an event again. This is the shortest safe
  [retention](crate::DedupLayer::retention).
- **Id signed**: *yes* if the sender's signature covers the id. *No* also if nothing is signed, or if the
  signed bytes are not documented.
- **Body**: the largest body, if the sender documents it. The default
  [`body_limit`](crate::DedupLayer::body_limit) is not below it.
- **Event type**: where the sender names the kind of an event. Operators see it in lists, and
  [`Delivery::event_type`](crate::Delivery::event_type) returns it.
- **Handshakes** reach the handler without deduplication.
- **Not verified**: what the sender's own documentation does not state.
- **Test**: the test in `tests/providers` that runs the preset on its samples.

The command `cargo run --example key -- --table` prints this page.
";

/// Formats a duration: `30 days`, `151 h 10 min`.
fn duration(duration: Duration) -> String {
    let seconds = duration.as_secs();
    if seconds.is_multiple_of(86_400) && seconds > 2 * 86_400 {
        return format!("{} days", seconds / 86_400);
    }
    let parts = [(seconds / 3_600, "h"), (seconds / 60 % 60, "min"), (seconds % 60, "s")];
    let parts = parts.iter().filter(|(count, _)| *count > 0);
    parts.map(|(count, unit)| format!("{count} {unit}")).collect::<Vec<_>>().join(" ")
}

impl<'de> Deserialize<'de> for Headers {
    fn deserialize<D: serde::Deserializer<'de>>(json: D) -> Result<Self, D::Error> {
        struct InOrder;

        impl<'de> Visitor<'de> for InOrder {
            type Value = Headers;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of strings")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Headers, A::Error> {
                let mut headers = Vec::new();
                while let Some(header) = members.next_entry()? {
                    headers.push(header);
                }
                Ok(Headers(headers))
            }
        }

        json.deserialize_map(InOrder)
    }
}
