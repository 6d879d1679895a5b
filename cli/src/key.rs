//! `key`: the keys of a captured request. The guide's page `incidents` describes both forms.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::BufReader;
use std::path::Path;
use std::{io, slice};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::header::{HeaderName, HeaderValue};
use http::{Method, Request, Uri, request};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tower_dedup::BoxError;
use tower_dedup::key::{Event, Extracted, RequestRef};
use tower_dedup::provider::{self, Preset};

use crate::failure::Failure;
use crate::options::Key;
use crate::output::write_json;

/// A captured request.
#[derive(Deserialize)]
pub(crate) struct Capture {
    method: Option<String>,
    url: Option<String>,
    headers: Option<BTreeMap<String, Value>>,
    body_utf8: Option<String>,
    body_base64: Option<String>,
}

/// The output.
#[derive(Serialize)]
#[serde(tag = "outcome", rename_all = "lowercase")]
enum Outcome {
    Key {
        key: String,
        #[serde(skip_serializing_if = "Option::is_none")]
        content_identity: Option<Identity>,
    },
    Keys {
        keys: Vec<String>,
        content_identities: Vec<Option<Identity>>,
    },
    Bypass,
    Missing,
    Malformed {
        reason: String,
    },
}

/// The second identity that an event has under `content_identity`.
#[derive(Serialize)]
struct Identity {
    namespace: String,
    id: String,
}

/// Prints the keys. A request without a key is an answer, too.
pub(crate) fn run(options: &Key) -> Result<bool, Failure> {
    let preset = find(&options.provider).map_err(Failure::usage)?;
    let file = options.file.as_deref().filter(|file| *file != Path::new("-"));
    let name = file.map_or_else(|| "stdin".to_owned(), |file| file.display().to_string());
    let name = if name.contains("://") { "a URL is no file" } else { &name };
    let outcome = read(preset, file);
    let outcome = outcome.map_err(|error| Failure::usage(format!("{name}: {error}")))?;
    write_json(&outcome)?;
    Ok(true)
}

/// Returns the preset of this name.
pub(crate) fn find(name: &str) -> Result<Preset, String> {
    provider::find(name).ok_or_else(|| {
        let names = |preset: &Preset| [&[preset.name()], preset.aliases()].concat().join(", ");
        let known: Vec<_> = provider::ALL.iter().map(names).collect();
        // A URL of a store may have a password.
        let name = if name.contains("://") { "by a URL".to_owned() } else { format!("{name:?}") };
        format!("no preset is named {name}; the presets are {}", known.join(", "))
    })
}

/// Reads a captured request, and the outcome of the preset on it.
fn read(preset: Preset, file: Option<&Path>) -> Result<Outcome, BoxError> {
    let capture: Capture = match file {
        Some(file) => serde_json::from_reader(BufReader::new(File::open(file)?))?,
        None => serde_json::from_reader(io::stdin().lock())?,
    };
    let (head, body) = capture.into_request()?;
    Ok(outcome(preset, &head, &body))
}

impl Capture {
    /// Returns the request as a server sees it, with the target in origin form.
    pub(crate) fn into_request(self) -> Result<(request::Parts, Bytes), BoxError> {
        let url: Uri = self.url.as_deref().filter(|url| !url.is_empty()).unwrap_or("/").parse()?;
        let target = url.path_and_query().map_or("/", |target| target.as_str());
        let method = self.method.as_deref().unwrap_or("POST").parse::<Method>()?;
        let mut request = Request::builder().method(method).uri(target).body(())?;
        for (name, value) in self.headers.into_iter().flatten() {
            let name = name.parse::<HeaderName>()?;
            for value in value.as_array().map_or(slice::from_ref(&value), Vec::as_slice) {
                let value = value.as_str().ok_or("the value of a header is no string")?;
                request.headers_mut().append(&name, HeaderValue::from_bytes(value.as_bytes())?);
            }
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
    let keys = preset.extractor().content_identity();
    match keys.extract(&RequestRef::new(head, body)) {
        Ok(Extracted::Keys(keys)) if keys.is_multi_event() => {
            let ids = keys.events().iter().map(|event| event.key().id().to_owned());
            let contents = keys.events().iter().map(content_identity);
            Outcome::Keys { keys: ids.collect(), content_identities: contents.collect() }
        }
        Ok(Extracted::Keys(keys)) => Outcome::Key {
            key: keys.first().id().to_owned(),
            content_identity: content_identity(&keys.events()[0]),
        },
        Ok(Extracted::Bypass) => Outcome::Bypass,
        // `Extracted` is non-exhaustive; the only other variant is `Missing`.
        Ok(_) => Outcome::Missing,
        Err(error) => Outcome::Malformed { reason: error.to_string() },
    }
}

/// An empty body has none.
fn content_identity(event: &Event) -> Option<Identity> {
    let content = event.content_identity()?;
    Some(Identity { namespace: content.namespace().to_owned(), id: content.id().to_owned() })
}
