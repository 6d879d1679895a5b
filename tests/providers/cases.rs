//! The samples, and the keys that each must give.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use bytes::Bytes;
use http::{Method, Request, Uri, request};
use serde::Deserialize;
use serde_json::Value;
use tower_dedup::key::{Extracted, RequestRef};
use tower_dedup::provider::Preset;

/// A request, and the outcome that a preset must read from it.
#[derive(Deserialize)]
pub(crate) struct Case {
    #[serde(default)]
    pub(crate) name: String,
    #[serde(default = "post")]
    pub(crate) method: String,
    #[serde(default = "hook")]
    pub(crate) url: String,
    pub(crate) headers: BTreeMap<String, String>,
    #[serde(default)]
    pub(crate) body_utf8: String,
    /// The file of a body that another project publishes without a request.
    body_file: Option<String>,
    pub(crate) expect: Outcome,
    #[serde(default)]
    pub(crate) why: String,
}

fn post() -> String {
    "POST".to_owned()
}

fn hook() -> String {
    "/hook".to_owned()
}

/// The outcome of a preset on a request.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(tag = "outcome", rename_all = "lowercase")]
pub(crate) enum Outcome {
    Key { key: String },
    Keys { keys: Vec<String> },
    Bypass,
    Missing,
    Malformed,
}

impl Outcome {
    pub(crate) fn keys(&self) -> &[String] {
        match self {
            Self::Key { key } => std::slice::from_ref(key),
            Self::Keys { keys } => keys,
            _ => &[],
        }
    }
}

/// Reads a request as the layer does: a method by which the sender does not deliver is bypassed.
pub(crate) fn outcome(preset: Preset, head: &request::Parts, body: &Bytes) -> Outcome {
    let delivers = |method| preset.methods().contains(method);
    if !(delivers(&head.method) || head.method == Method::HEAD && delivers(&Method::GET)) {
        return Outcome::Bypass;
    }
    match preset.extractor().extract(&RequestRef::new(head, body)) {
        Ok(Extracted::Keys(keys)) => {
            let events = keys.events();
            assert!(events.iter().all(|event| event.key().namespace() == preset.name()));
            assert!(
                events.iter().all(|event| event.alias().or(event.content_identity()).is_none())
            );
            let ids = events.iter().map(|event| event.key().id().to_owned());
            match keys.is_multi_event() {
                true => Outcome::Keys { keys: ids.collect() },
                false => Outcome::Key { key: ids.collect() },
            }
        }
        Ok(Extracted::Bypass) => Outcome::Bypass,
        Ok(_) => Outcome::Missing,
        Err(_) => Outcome::Malformed,
    }
}

impl Case {
    /// Returns the request as a server sees it, with the target in origin form.
    pub(crate) fn parts(&self) -> (request::Parts, Bytes) {
        let url: Uri = self.url.parse().unwrap();
        let target = url.path_and_query().unwrap().as_str();
        let mut request = Request::builder().method(self.method.as_str()).uri(target);
        for (name, value) in &self.headers {
            request = request.header(name, value.as_bytes());
        }
        (request.body(()).unwrap().into_parts().0, Bytes::from(self.body_utf8.clone()))
    }
}

/// Returns all samples of a preset: those of the sender's folder, which come from other projects, then constructed ones.
pub(crate) fn of(preset: Preset) -> Vec<Case> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/payloads");
    let read = |path: &Path| {
        fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    };
    let folder = fs::read_dir(root.join(preset.name().replace('-', "_")));
    let mut files: Vec<_> = folder.into_iter().flatten().map(|file| file.unwrap().path()).collect();
    files.sort();
    files.push(root.join("constructed").join(preset.name()).with_extension("json"));
    let mut cases = Vec::new();
    for file in files {
        let samples = match serde_json::from_str(&read(&file)).unwrap() {
            Value::Array(samples) => samples,
            sample => vec![sample],
        };
        // The others are bodies, and vectors of signatures.
        if samples[0].get("expect").is_none() {
            continue;
        }
        for sample in samples {
            let mut case: Case = serde_json::from_value(sample).unwrap();
            case.name = format!("{}, {}", file.display(), case.name);
            if let Some(body) = &case.body_file {
                case.body_utf8 = read(&root.join(body));
            }
            cases.push(case);
        }
    }
    cases
}
