//! [`Template`]: a delivery that is made with any id, and [`Signer`].

use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use std::{fs, process};

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderName, HeaderValue, Request};
use http_body_util::{BodyExt, Full};
use serde_json::{Value, json};
use tower_dedup::provider::Preset;
use tower_dedup::testing;
use tower_dedup::verify::Scheme;

use crate::wire::OWN_HEADERS;

/// An id that a sample carries until it is replaced. Digits, so that it may be a number.
const PROBE: &str = "704210937";

pub(crate) const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// Where a delivery has its id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Place {
    Header(HeaderName),
    Json(String),
    /// In a form, which has the id of the sample.
    Form,
}

impl Place {
    /// Reads `header:NAME` or `json:/POINTER`.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            Some(("header", name)) => {
                name.parse().map(Self::Header).map_err(|error| format!("--id: {error}"))
            }
            Some(("json", pointer)) if pointer.starts_with('/') => {
                Ok(Self::Json(pointer.to_owned()))
            }
            _ => Err("--id is `header:NAME` or `json:/POINTER`".to_owned()),
        }
    }

    /// Returns the place where the sample of a preset has this id.
    fn of(sample: &Request<Bytes>, id: &str) -> Self {
        let header = sample.headers().iter().find(|(_, value)| value.as_bytes() == id.as_bytes());
        match (header, serde_json::from_slice(sample.body())) {
            (Some((name, _)), _) => Self::Header(name.clone()),
            (None, Ok(body)) => pointer_of(&body, id).map_or(Self::Form, Self::Json),
            (None, Err(_)) => Self::Form,
        }
    }
}

/// Returns the pointer of the string or number with this text.
fn pointer_of(value: &Value, text: &str) -> Option<String> {
    match value {
        Value::String(string) if string == text => Some(String::new()),
        Value::Number(number) if number.to_string() == text => Some(String::new()),
        Value::Array(list) => list
            .iter()
            .enumerate()
            .find_map(|(at, value)| Some(format!("/{at}{}", pointer_of(value, text)?))),
        Value::Object(map) => map.iter().find_map(|(name, value)| {
            let name = name.replace('~', "~0").replace('/', "~1");
            Some(format!("/{name}{}", pointer_of(value, text)?))
        }),
        _ => None,
    }
}

/// A delivery, of which each copy has an id.
#[derive(Debug, Clone)]
pub(crate) struct Template {
    request: Request<Bytes>,
    pub(crate) place: Place,
    /// The id is a JSON number.
    pub(crate) is_number: bool,
    /// The body is not the user's: each delivery has another one, as real events do.
    is_made: bool,
}

impl Template {
    /// Makes the sample of a sender.
    pub(crate) fn of_preset(preset: Preset, path: &str) -> Self {
        let (head, body) = testing::request(preset, path, PROBE).into_parts();
        let body = futures_util::FutureExt::now_or_never(Full::collect(body));
        let body = body.and_then(Result::ok).map(|body| body.to_bytes()).unwrap_or_default();
        let request = Request::from_parts(head, body);
        let place = Place::of(&request, PROBE);
        Self { is_number: is_number(&request, &place), request, place, is_made: true }
    }

    /// Makes a small JSON body with the id in this place.
    pub(crate) fn with_id(place: Place, path: &str) -> Result<Self, String> {
        let mut body = json!({});
        if let Place::Json(pointer) = &place {
            let names = pointer[1..].split('/');
            let names = names.map(|name| name.replace("~1", "/").replace("~0", "~"));
            *names.fold(&mut body, |at, name| &mut at[name]) = PROBE.into();
        }
        let request = Request::post(path).header(CONTENT_TYPE, "application/json");
        let request = request.body(body.to_string().into()).map_err(|error| error.to_string())?;
        Ok(Self { request, place, is_number: false, is_made: true })
    }

    /// Reads a delivery from a file.
    pub(crate) fn read(file: &Path, place: Place) -> Result<Self, String> {
        let name = file.display();
        let text = fs::read(file).map_err(|error| format!("{name}: {error}"))?;
        let request = parse(&text).map_err(|error| format!("{name}: {error}"))?;
        let is_there = match &place {
            Place::Header(_) => true,
            Place::Json(pointer) => serde_json::from_slice::<Value>(request.body())
                .is_ok_and(|body| body.pointer(pointer).is_some()),
            Place::Form => false,
        };
        if !is_there {
            return Err(format!("{name}: there is no value at the place of the id: see --id"));
        }
        Ok(Self { is_number: is_number(&request, &place), request, place, is_made: false })
    }

    /// Returns the delivery with this id, unsigned.
    pub(crate) fn with(&self, id: &str) -> Request<Bytes> {
        self.noted(id, id)
    }

    /// Returns the delivery with this id; bodies that are made differ by the note.
    pub(crate) fn noted(&self, id: &str, note: &str) -> Request<Bytes> {
        let mut request = self.request.clone();
        match &self.place {
            Place::Header(name) => {
                let value = HeaderValue::from_bytes(id.as_bytes());
                request
                    .headers_mut()
                    .insert(name, value.expect("an id without control characters"));
                if self.is_made {
                    *request.body_mut() = with_member(request.body(), "judge", note);
                }
            }
            Place::Json(pointer) => {
                let mut body: Value = serde_json::from_slice(request.body()).unwrap_or_default();
                if let Some(value) = body.pointer_mut(pointer) {
                    *value = match id.parse::<u64>() {
                        Ok(number) if self.is_number => number.into(),
                        _ => id.into(),
                    };
                }
                *request.body_mut() = body.to_string().into();
            }
            Place::Form => {
                let body =
                    String::from_utf8_lossy(request.body()).replace(PROBE, &percent_encoded(id));
                *request.body_mut() = body.into();
            }
        }
        request
    }
}

fn is_number(request: &Request<Bytes>, place: &Place) -> bool {
    let Place::Json(pointer) = place else { return false };
    let body = serde_json::from_slice::<Value>(request.body());
    body.is_ok_and(|body| body.pointer(pointer).is_some_and(Value::is_number))
}

fn percent_encoded(text: &str) -> String {
    form_urlencoded::byte_serialize(text.as_bytes()).collect()
}

/// Returns a body with one more member in its first JSON object, or one more field of a form. The other bytes stay.
pub(crate) fn with_member(body: &Bytes, name: &str, value: &str) -> Bytes {
    let Some(at) = body.iter().position(|byte| *byte == b'{') else {
        let field = format!("&{name}={}", percent_encoded(value));
        return [body, field.as_bytes()].concat().into();
    };
    let (before, after) = body.split_at(at + 1);
    let is_last = after.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'}');
    let member = format!(r#""{name}":{}{}"#, Value::from(value), if is_last { "" } else { "," });
    [before, member.as_bytes(), after].concat().into()
}

/// Reads a request as HTTP writes it; the lines of its head may end without a carriage return.
fn parse(text: &[u8]) -> Result<Request<Bytes>, String> {
    let mut headers = [httparse::EMPTY_HEADER; 128];
    let mut head = httparse::Request::new(&mut headers);
    let parsed = head.parse(text).map_err(|error| error.to_string())?;
    let httparse::Status::Complete(length) = parsed else {
        return Err("no empty line ends the headers".to_owned());
    };
    let mut body = &text[length..];
    let mut request =
        Request::builder().method(head.method.unwrap_or("POST")).uri(head.path.unwrap_or("/"));
    for header in head.headers.iter() {
        if header.name.eq_ignore_ascii_case("content-length") {
            let length = str::from_utf8(header.value).ok().and_then(|value| value.parse().ok());
            body = length.and_then(|length| body.get(..length)).unwrap_or(body);
        }
        if !OWN_HEADERS.iter().any(|own| header.name.eq_ignore_ascii_case(own.as_str())) {
            request = request.header(header.name, header.value);
        }
    }
    request.body(Bytes::copy_from_slice(body)).map_err(|error| error.to_string())
}

/// Signs deliveries as their sender does.
#[derive(Debug, Clone)]
pub(crate) struct Signer {
    scheme: Scheme,
    secret: String,
    public_url: String,
    /// The headers that depend on the secret; none if the signature is in the body.
    pub(crate) headers: Vec<HeaderName>,
    pub(crate) signs_time: bool,
}

impl Signer {
    /// Checks the secret.
    pub(crate) fn new(preset: Preset, secret: String, public_url: String) -> Result<Self, String> {
        let name = preset.name();
        let scheme = preset.scheme().ok_or_else(|| format!("it is not known how {name} signs"))?;
        let mut signer =
            Self { scheme, secret, public_url, headers: Vec::new(), signs_time: false };
        let event = || Template::of_preset(preset, "/").with(PROBE);
        let now = SystemTime::now();
        let signed = signer.sign_at(event(), now)?;
        signer.headers = changed(&signed, &signer.forger().sign_at(event(), now)?);
        signer.signs_time = !changed(&signed, &signer.sign_at(event(), now - DAY)?).is_empty();
        Ok(signer)
    }

    /// Signs at this moment.
    pub(crate) fn sign(&self, request: Request<Bytes>) -> Result<Request<Bytes>, String> {
        self.sign_at(request, SystemTime::now())
    }

    pub(crate) fn sign_at(
        &self,
        request: Request<Bytes>,
        at: SystemTime,
    ) -> Result<Request<Bytes>, String> {
        let signed = self.scheme.sign(&self.secret, Some(&self.public_url), at, request);
        signed.map_err(|error| format!("the delivery cannot be signed: {error}"))
    }

    /// Returns a signer with another secret of the same form.
    pub(crate) fn forger(&self) -> Self {
        // One character is another one, which is valid in hexadecimal and base64.
        let at = self.secret.char_indices().map(|(at, _)| at).nth(self.secret.chars().count() / 2);
        let (before, after) = self.secret.split_at(at.unwrap_or_default());
        let mut after = after.chars();
        let other = if matches!(after.next(), Some('a' | 'A')) { 'b' } else { 'a' };
        let secret = format!("{before}{other}{}", after.as_str());
        Self { secret, ..self.clone() }
    }
}

/// Returns the headers whose values differ.
fn changed(one: &Request<Bytes>, other: &Request<Bytes>) -> Vec<HeaderName> {
    let (one, other) = (one.headers(), other.headers());
    one.keys().filter(|name| one.get(*name) != other.get(*name)).cloned().collect()
}

/// Ids that no other run has had: UUIDs, or numbers. A later one is greater, and none is a part of another.
#[derive(Debug)]
pub(crate) struct Ids {
    run: String,
    digits: usize,
    next: AtomicU32,
}

impl Ids {
    pub(crate) fn new(is_number: bool) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let (seconds, run) = (now.as_secs(), now.subsec_micros() ^ process::id());
        let (run, digits) = match is_number {
            true => (seconds.to_string(), 5),
            false => (format!("{seconds:08x}-{:04x}-4000-8000-", run & 0xffff), 12),
        };
        Self { run, digits, next: AtomicU32::new(1) }
    }

    pub(crate) fn fresh(&self) -> String {
        let Self { run, digits, next } = self;
        format!("{run}{:0digits$}", next.fetch_add(1, Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use http::Method;
    use tower_dedup::provider;

    use super::*;

    #[test]
    fn sample_of_each_preset_takes_any_id() {
        for preset in provider::ALL {
            let template = Template::of_preset(*preset, "/hook");
            let ids = Ids::new(template.is_number);
            let [one, other] = [ids.fresh(), ids.fresh()];
            let [a, b] = [&one, &other].map(|id| template.noted(id, "same"));
            let text = |request: &Request<Bytes>| {
                format!("{:?} {}", request.headers(), String::from_utf8_lossy(request.body()))
            };
            assert!(!text(&a).contains(PROBE), "{}", text(&a));
            assert_eq!(text(&a).matches(&one).count(), 1, "{}: {}", preset.name(), text(&a));
            assert_eq!(text(&a).replace(&one, &other), text(&b), "{}", preset.name());
            assert!(other > one);
        }
    }

    #[test]
    fn forger_has_another_secret_of_the_same_form() {
        let cases = [
            (provider::STANDARD_WEBHOOKS, "whsec_a2tra2tra2tra2tra2tra2tra2tra2tr", true),
            (provider::ADYEN, "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA", false),
            (provider::GITHUB, "a", false),
            (provider::GITLAB, "token", false),
        ];
        for (preset, secret, signs_time) in cases {
            let signer = Signer::new(preset, secret.to_owned(), "http://localhost".to_owned());
            let signer = signer.unwrap();
            let event = Template::of_preset(preset, "/").with("1");
            let [valid, forged] = [&signer, &signer.forger()]
                .map(|signer| signer.sign_at(event.clone(), SystemTime::UNIX_EPOCH).unwrap());
            assert_ne!(format!("{valid:?}"), format!("{forged:?}"));
            let in_headers = usize::from(preset.name() != provider::ADYEN.name());
            assert_eq!((signer.headers.len(), signer.signs_time), (in_headers, signs_time));
        }
    }

    #[test]
    fn request_of_a_file_has_its_head_and_body() {
        let text = b"PUT /a?b HTTP/1.1\nHost: x\nX-Id: 1\ncontent-length: 2\n\n{}\n";
        let request = parse(text).unwrap();
        assert_eq!(
            (request.method(), request.uri().to_string()),
            (&Method::PUT, "/a?b".to_owned())
        );
        assert_eq!((request.headers().len(), &request.body()[..]), (1, &b"{}"[..]));
        assert!(parse(b"POST / HTTP/1.1\nx: y\n").is_err());
    }

    #[test]
    fn member_is_added_and_the_other_bytes_stay() {
        let cases = [
            ("{}", r#"{"n":"v"}"#),
            (r#" { "a" :1}"#, r#" {"n":"v", "a" :1}"#),
            (r#"[{"a":1}]"#, r#"[{"n":"v","a":1}]"#),
            ("a=b", "a=b&n=v"),
        ];
        for (body, expected) in cases {
            assert_eq!(with_member(&Bytes::from(body), "n", "v"), expected);
        }
    }

    #[test]
    fn body_with_an_id_alone_has_it_at_its_pointer() {
        let place = Place::parse("json:/data/the~1id").unwrap();
        let request = Template::with_id(place, "/").unwrap().with("x");
        let body: Value = serde_json::from_slice(request.body()).unwrap();
        assert_eq!(body["data"]["the/id"], "x");
        assert!(Place::parse("json:id").is_err() && Place::parse("id").is_err());
    }
}
