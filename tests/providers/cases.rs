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
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) method: String,
    pub(crate) url: String,
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) body_utf8: String,
    pub(crate) expect: Outcome,
    pub(crate) why: String,
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
            assert!(events.iter().all(|event| event.second_identity().is_none()));
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

/// Exceptions with their reasons. Samples of other projects state what identifies their events. An
/// exception is a sample without an id, or one for which the preset's rule differs.
const RULES: &[(&str, &str, &str, &str)] = &[
    ("standard_webhooks/vectors.json", "missing-id", r#"{"outcome":"missing"}"#, "no id"),
    ("svix/vectors.json", "missing-id", r#"{"outcome":"missing"}"#, "no id"),
    (
        "slack/cases.json",
        "sdk-vector-slash-command",
        r#"{"outcome":"bypass"}"#,
        "a form has no id of an event",
    ),
    ("slack/cases.json", "url_verification", r#"{"outcome":"bypass"}"#, "must be answered"),
    ("slack/cases.json", "app_rate_limited", r#"{"outcome":"bypass"}"#, "has no id"),
    (
        "aws_sns/subscription_confirmation.json",
        "",
        r#"{"outcome":"bypass"}"#,
        "carries an id, and must reach the handler",
    ),
    (
        "twilio/cases.json",
        "helper-lib-voice",
        r#"{"outcome":"key","key":"|CA1234567890ABCDE||||"}"#,
        "the key has more parts than the sample names",
    ),
    ("twilio/cases.json", "helper-lib-array-param", r#"{"outcome":"missing"}"#, "no id"),
    ("twilio/cases.json", "helper-lib-duplicate-values", r#"{"outcome":"missing"}"#, "no id"),
    (
        "twilio/cases.json",
        "helper-lib-wrong-signature",
        r#"{"outcome":"key","key":"|CA1234567890ABCDE||||"}"#,
        "whether a signature holds is for the layer outside",
    ),
    ("twilio/cases.json", "helper-lib-json-bodySHA256", r#"{"outcome":"missing"}"#, "no id"),
];

/// Returns the files of a preset: whole requests, and bodies only.
fn files(preset: &str) -> (&'static [&'static str], &'static [Body]) {
    match preset {
        "standard-webhooks" => (&["standard_webhooks/vectors.json"], &[]),
        "svix" => (&["svix/vectors.json"], RESEND),
        "cloudevents" => (
            &["cloudevents/batch.json", "cloudevents/binary.json", "cloudevents/structured.json"],
            &[],
        ),
        "github" => (&[], GITHUB),
        "gitlab" => (&[], GITLAB),
        "gitea" => (&[], GITEA),
        "stripe" => (&["stripe/cases.json"], &[]),
        "shopify" => (&["shopify/cases.json"], &[]),
        "slack" => (&["slack/cases.json"], &[]),
        "twilio" => (&["twilio/cases.json"], &[]),
        "sendgrid" => (&["sendgrid/signature_vector.json"], SENDGRID),
        "postmark" => (&[], POSTMARK),
        "aws-sns" => {
            (&["aws_sns/bounce_event.json", "aws_sns/subscription_confirmation.json"], &[])
        }
        _ => (&[], &[]),
    }
}

/// A file with a body only, constructed headers, and the expected keys: none of a handshake.
type Body = (&'static str, &'static [(&'static str, &'static str)], &'static [&'static str]);

const GITHUB: &[Body] = &[
    (
        "github/push.payload.json",
        &[("X-GitHub-Event", "push"), ("X-GitHub-Delivery", "g1")],
        &["g1"],
    ),
    (
        "github/issues.opened.payload.json",
        &[("X-GitHub-Event", "issues"), ("X-GitHub-Delivery", "g2")],
        &["g2"],
    ),
    ("github/ping.payload.json", &[("X-GitHub-Event", "ping"), ("X-GitHub-Delivery", "g3")], &[]),
    // The header is not signed: the body stays an event.
    (
        "github/push.payload.json",
        &[("X-GitHub-Event", "ping"), ("X-GitHub-Delivery", "g1")],
        &["g1"],
    ),
];
const GITLAB: &[Body] = &[
    ("gitlab/push-event.json", &[("Idempotency-Key", "l1")], &["l1"]),
    ("gitlab/issue-event.json", &[("Idempotency-Key", "l2")], &["l2"]),
];
const GITEA: &[Body] = &[("gitea/push-event.json", &[("X-Gitea-Delivery", "t1")], &["t1"])];
const RESEND: &[Body] = &[
    ("resend/sent_event.json", &[("svix-id", "r1")], &["r1"]),
    // The same e-mail, another event.
    ("resend/hard_bounced_event.json", &[("svix-id", "r2")], &["r2"]),
];
const SENDGRID: &[Body] = &[(
    "sendgrid/batch.json",
    &[],
    &[
        "ZyjAM5rnQmuI1KFInHQ3Nw",
        "nOSv8m0eTQ-vxvwNwt3fZQ",
        "3NPOePGOTkeM_U3fgWApfg",
        "zmzJhfJgAfUSOW80yEbPyw==",
        "oxy9OLwMTAy5EsuZn1qhIg",
    ],
)];
const POSTMARK: &[Body] = &[
    ("postmark/bounce_event.json", &[], &["Bounce|901542550"]),
    (
        "postmark/delivered_event.json",
        &[],
        &["Delivery|883953f4-6105-42a2-a16a-77a8eac79483|recipient@example.com|\
             2014-08-01T13:28:10.2735393-04:00||"],
    ),
    (
        "postmark/open_event.json",
        &[],
        &["Open|f4830d10-9c35-4f0c-bca3-3d9b459821f8|recipient@example.com|\
             2016-04-27T16:21:41.2493688-04:00||"],
    ),
];

fn read(file: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/payloads").join(file);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Returns all samples of a preset; those of other projects come first.
pub(crate) fn of(preset: Preset) -> Vec<Case> {
    let (captures, bodies) = files(preset.name());
    let mut cases = Vec::new();
    for file in captures {
        cases.extend(captured(file));
    }
    for (file, headers, keys) in bodies {
        let headers = headers.iter().map(|(name, value)| ((*name).into(), (*value).into()));
        cases.push(Case {
            name: (*file).into(),
            method: "POST".into(),
            url: "/hook".into(),
            headers: headers.collect(),
            body_utf8: read(file),
            expect: match keys {
                [] => Outcome::Bypass,
                [key] => Outcome::Key { key: (*key).to_owned() },
                keys => Outcome::Keys { keys: keys.iter().map(ToString::to_string).collect() },
            },
            why: "a body with constructed headers".into(),
        });
    }
    cases.extend(captured(&format!("constructed/{}.json", preset.name())));
    cases
}

/// Reads a file with one request or a list of requests.
fn captured(file: &str) -> Vec<Case> {
    let requests = match serde_json::from_str(&read(file)).unwrap() {
        Value::Array(requests) => requests,
        request => vec![request],
    };
    assert!(!requests.is_empty(), "{file} is empty");
    requests.iter().map(|request| case(file, request)).collect()
}

fn case(file: &str, request: &Value) -> Case {
    let text = |name: &str| request[name].as_str().map(str::to_owned);
    let name = text("name").unwrap_or_default();
    let rule = RULES.iter().find(|rule| rule.0 == file && rule.1 == name);
    let expect = match rule {
        Some((_, _, outcome, _)) => serde_json::from_str(outcome).unwrap(),
        None if request.get("expect").is_some() => {
            serde_json::from_value(request["expect"].clone()).unwrap()
        }
        None => expected(request).unwrap_or_else(|| panic!("{file}, {name}: no rule for it")),
    };
    let headers = request["headers"].as_object().unwrap().iter();
    Case {
        method: text("method").unwrap_or_else(|| "POST".into()),
        url: text("url").unwrap_or_else(|| "/hook".into()),
        headers: headers
            .map(|(name, value)| (name.clone(), value.as_str().unwrap().to_owned()))
            .collect(),
        body_utf8: text("body_utf8").unwrap(),
        expect,
        why: rule.map(|rule| rule.3.into()).or_else(|| text("why")).unwrap_or_default(),
        name: format!("{file}, {name}"),
    }
}

/// Returns the outcome that a sample of another project expects. `expected_key` is an id or its
/// fields. `expected_keys` is a list of ids or of lists of parts.
fn expected(request: &Value) -> Option<Outcome> {
    let joined = |parts: &Value| -> Option<String> {
        let parts = parts.as_array()?.iter().map(Value::as_str);
        Some(parts.collect::<Option<Vec<_>>>()?.join("|"))
    };
    if let Some(keys) = request.get("expected_keys").and_then(Value::as_array) {
        let keys: Option<Vec<_>> = keys
            .iter()
            .map(|key| key.as_str().map(str::to_owned).or_else(|| joined(key)))
            .collect();
        // In the modes of one event, a list of one names that event.
        let batch = request["body_utf8"].as_str()?.starts_with('[');
        let mut keys = keys?;
        return Some(match batch {
            true => Outcome::Keys { keys },
            false => Outcome::Key { key: keys.remove(0) },
        });
    }
    match request.get("expected_key")? {
        Value::String(key) => Some(Outcome::Key { key: key.clone() }),
        // Twilio: `Field=value`, without the account and without missing fields.
        Value::Array(fields) => {
            let parts: Vec<_> =
                fields.iter().filter_map(Value::as_str).filter_map(|f| f.split_once('=')).collect();
            let [(_, sid), status @ ..] = &parts[..] else { return None };
            let status = status.first().map_or("", |(_, status)| status);
            Some(Outcome::Key { key: format!("AC00000000000000000000000000000001|{sid}|{status}") })
        }
        _ => None,
    }
}
