//! `key`: the keys of a captured request.
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
//! Keys are printed as they are stored, without their namespace.

use std::error::Error;
use std::fmt::Write as _;
use std::io::{self, Read, Write};
use std::path::Path;
use std::time::Duration;
use std::{fmt, fs};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::header::{HeaderName, HeaderValue};
use http::{Method, Request, Uri, request};
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Serialize};
use tower_dedup::key::{Extracted, RequestRef};
use tower_dedup::provider::{self, Preset};

use crate::failure::{Failure, in_one_line};
use crate::options::Key;
use crate::output::json;

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

/// Prints the keys. A request without a key is an answer, too.
pub(crate) fn run(options: &Key) -> Result<bool, Failure> {
    let text = match &options.provider {
        _ if options.list => list(),
        Some(name) => find(name)
            .map_err(Into::into)
            .and_then(|preset| outcome_line(preset, options.file.as_deref()))
            .map_err(|error| Failure::usage(in_one_line(&*error)))?,
        None => return Err(Failure::usage("no preset is given")),
    };
    io::stdout().write_all(text.as_bytes())?;
    Ok(true)
}

fn find(name: &str) -> Result<Preset, String> {
    provider::find(name).ok_or_else(|| {
        let known: Vec<_> = provider::ALL
            .iter()
            .flat_map(|preset| {
                std::iter::once(preset.name()).chain(preset.aliases().iter().copied())
            })
            .collect();
        // A URL of a store may have a password.
        let name = if name.contains("://") { "by a URL".to_owned() } else { format!("{name:?}") };
        format!("no preset is named {name}; the presets are {}", known.join(", "))
    })
}

fn outcome_line(preset: Preset, file: Option<&Path>) -> Result<String, Box<dyn Error>> {
    let file = file.filter(|file| *file != Path::new("-"));
    let name = file.map_or_else(|| "stdin".to_owned(), |file| file.display().to_string());
    let name = if name.contains("://") { "a URL is no file".to_owned() } else { name };
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
    let line = json(&outcome(preset, &head, &body)).map_err(|failure| failure.message)?;
    Ok(line + "\n")
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
