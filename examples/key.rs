//! Reads a captured request and says what it would be known by.
//!
//! ```text
//! cargo run --example key -- stripe request.json
//! cargo run --example key -- github < request.json
//! cargo run --example key -- --list
//! cargo run --example key -- --table > src/docs/providers.md
//! ```
//!
//! A request is JSON: `method` (POST if it is missing), `url` (`/`), `headers` (an object of
//! strings), and its body as `body_utf8` or `body_base64`. Other fields are passed over. The answer
//! is one line of JSON on stdout:
//!
//! | answer | the request |
//! |---|---|
//! | `{"outcome":"key","key":"…"}` | is one event |
//! | `{"outcome":"keys","keys":["…"]}` | is a batch |
//! | `{"outcome":"bypass"}` | is no event, or has a method by which the sender does not deliver |
//! | `{"outcome":"missing"}` | has no key |
//! | `{"outcome":"malformed","reason":"…"}` | has a key that cannot be read |
//!
//! Keys are shown as they are stored, without their namespace. The exit code is 1 if the sender is
//! not known or the request cannot be read.

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

/// Reads a captured request and says what it would be known by.
#[derive(Debug, Parser)]
struct Options {
    /// The preset's name, or an alias of it.
    #[arg(required_unless_present_any = ["list", "table"])]
    provider: Option<String>,
    /// The captured request, in JSON; `-` or nothing is stdin.
    file: Option<PathBuf>,
    /// Lists every preset with its retention floor, one a line.
    #[arg(long, exclusive = true)]
    list: bool,
    /// Prints the guide's page of presets.
    #[arg(long, exclusive = true)]
    table: bool,
}

/// What was captured.
#[derive(Debug, Deserialize)]
struct Capture {
    method: Option<String>,
    url: Option<String>,
    headers: Option<Headers>,
    body_utf8: Option<String>,
    body_base64: Option<String>,
}

/// In their order, a repeated name included.
#[derive(Debug, Default)]
struct Headers(Vec<(String, String)>);

/// The answer, as it is printed.
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
        Some(name) => answer(find(name)?, options.file.as_deref())?,
        None => return Err("which provider?".into()),
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
        format!("no preset is named {name:?}; known are {}", known.join(", "))
    })
}

fn answer(preset: Preset, file: Option<&Path>) -> Result<String, Box<dyn Error>> {
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
    /// The request as a server sees it: the target in origin form.
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
            (Some(_), Some(_)) => return Err("both body_utf8 and body_base64 are there".into()),
            (Some(text), None) => text.into(),
            (None, Some(base64)) => STANDARD.decode(base64)?.into(),
            (None, None) => Bytes::new(),
        };
        Ok((request.into_parts().0, body))
    }
}

fn outcome(preset: Preset, head: &request::Parts, body: &Bytes) -> Outcome {
    let delivers = |method| preset.methods().contains(method);
    // As the layer: routers answer HEAD by the handler of GET.
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
        // Nothing else is there today.
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

fn table() -> String {
    let mut text = String::from(TABLE_HEAD);
    for preset in provider::ALL {
        let names: Vec<_> = [&[preset.name()], preset.aliases()]
            .concat()
            .into_iter()
            .map(|name| format!("`{name}`"))
            .collect();
        let constant = preset.name().to_uppercase().replace('-', "_");
        // `box` is a reserved word.
        let test = preset.name().replace('-', "_").replace("box", "box_");
        let retries = match preset.retries() {
            Retries::Automatic => "yes",
            Retries::ConnectionFailure => "when the connection fails",
            Retries::Never => "**never**",
            _ => "not documented",
        };
        writeln!(
            text,
            "| [{}](crate::provider::{constant}): {} | {} | {}: {} | {retries}: {} | {} | {} | {} | \
             [page]({}) | `{test}` |",
            preset.title(),
            names.join(", "),
            preset.key_in_words().replace('|', "\\|"),
            duration(preset.retention_floor()),
            preset.floor_basis(),
            preset.retries_how(),
            if preset.signed_id() { "yes" } else { "no" },
            preset.handshakes().unwrap_or("none"),
            preset.unverified().unwrap_or("nothing"),
            preset.source(),
        )
        .expect("a string");
    }
    text.push_str(TABLE_FOOT);
    text
}

const TABLE_HEAD: &str = "\
All presets, as the code has them.

- *Key*: header names, form fields, and JSON pointers into the body; those of *each* are into the
  event. `?` marks a part that may be missing, `|` joins them.
- *Again within*: how long an event may come again, and so the shortest safe retention.
- *Id signed*: whether the sender's signature covers the id; *no* also where nothing is signed, or
  where the signed bytes are not documented. [`guide::keys`](crate::guide::keys) says what to do.
- *Handshakes* reach the handler undeduplicated.
- *Not verified*: what the sender's own documentation does not say.
- *Test*: the test of `tests/providers` that holds the preset to its samples.

| preset and aliases | key | again within | retries by itself | id signed | handshakes | not verified | source | test |
|---|---|---|---|---|---|---|---|---|
";

const TABLE_FOOT: &str = "
A sender that **never** retries loses an event with every answer that is not a 2xx: write a job down
and answer, as `examples/ack_fast.rs` does.

This page is printed by `cargo run --example key -- --table`.
";

/// `30 days`, `151 h 10 min`.
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
