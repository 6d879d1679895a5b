//! Twilio: messages, calls, and the callbacks of its other products.

use std::collections::BTreeSet;
use std::sync::LazyLock;

use http::Method;

use super::preset::{DAY, DEFAULTS, Preset, Retries};
use super::read::joined;
use super::scheme::{Proof, Scheme};
use crate::error::KeyError;
use crate::key::{self, KeyPart, RequestRef, Rule, hex, sha256, without_mark};

/// Twilio: the account, the message or call, and its status. The values are form fields or, for
/// webhooks that are configured as GET, query parameters.
///
/// One message reports several statuses under one `MessageSid`. With the id alone, `delivered`
/// would be a duplicate of `sent`. The key is
///
/// - `AccountSid|MessageSid|MessageStatus` (or `SmsStatus`), or
/// - `AccountSid|CallSid|CallStatus|SequenceNumber|RecordingSid|RecordingStatus`.
///
/// Every part but `MessageSid` and `CallSid` is empty if the request does not have it.
///
/// Events of **other kinds** share these ids, or have neither: [streams], [conferences],
/// [transcriptions], payments, [conversations], rooms, [tasks], SIMs and others. They have another
/// SID, or a field that no status has. Their key has one more part, `fields_` and the SHA-256 of
/// the sorted fields, or consists of `AccountSid` and that part. Twilio signs these fields, and a
/// retry has the same ones, except `RetryCount`, which is left out. Webhooks in JSON have no key
/// here.
///
/// This key is for *callbacks*. The turns of a conversation (the `action` of a `<Gather>` or
/// `<Record>`) need the body of the response. They repeat one `CallSid` with one status when a menu
/// asks again. Leave such routes out, or see [the
/// guide](crate::guide::providers#senders-without-a-preset).
///
/// **Twilio retries no status by default**: a response other than 2xx, 503 included, loses the
/// event. A [connection override][overrides] at the end of the webhook's URL changes that:
/// `#rc=5&rp=all` is up to five retries after failed connections, timeouts and statuses, all within
/// 15 s. According to third parties, the fragment is not signed. Twilio's page does not say so:
/// test it with a message of your own. Do not give `verifier_at` the fragment. Only `rc`, its
/// default of 1 and the 15 s are confirmed.
///
/// [overrides]: https://www.twilio.com/docs/usage/webhooks/webhooks-connection-overrides
/// [streams]: https://www.twilio.com/docs/voice/twiml/stream
/// [conferences]: https://www.twilio.com/docs/voice/twiml/conference
/// [transcriptions]: https://www.twilio.com/docs/voice/twiml/transcription
/// [conversations]: https://www.twilio.com/docs/conversations/conversations-webhooks
/// [tasks]: https://www.twilio.com/docs/taskrouter/api/event/reference
///
/// [Signature](https://www.twilio.com/docs/usage/security#validating-requests): HMAC-SHA1 over the
/// public URL and the form fields, without separators. If the body is not a form, the URL has its
/// digest.
///
/// - `MessageStatus=sent&SmsSid=SM1` and `MessageStatus=sentSmsSidSM1` have the same signature, but
///   different keys. An attacker can also hide an optional field of the key in the field beside it.
///   Let the handler refuse unknown statuses, values that are not a SID, and requests without a
///   field that Twilio always sends, such as `AccountSid`.
/// - The content type is not signed. A form with another content type is refused, because its
///   fields are not read.
/// - The time is not signed, and neither is the method: the text of a GET is also that of a POST
///   with the end of the query in its form. So the verifier derives the method from
///   `AccountSid=AC…` (`AC` and 32 hexadecimal digits). A GET needs it in its query, and no body.
///   Any other request is refused with it in its URL or fields: put no `AccountSid` into the URL of
///   a webhook that Twilio sends by POST. A request without a form is refused with `AccountSidAC…`
///   in its URL. A message whose text has the other spelling is refused, too.
pub const TWILIO: Preset = Preset {
    name: "twilio",
    rule: || Rule::part(by_fields()),
    bypass: Some(is_probe),
    methods: &[Method::POST, Method::GET],
    floor: DAY, // our estimate: no schedule is documented
    retries: Retries::ConnectionFailure,
    scheme: Some(Scheme::new("x-twilio-signature", Proof::Twilio)),
    signed_id: Some(true),
    sample_headers: &[("content-type", "application/x-www-form-urlencoded")],
    sample: "AccountSid=AC_sample&MessageSid={id}&MessageStatus=delivered",
    ..DEFAULTS
};

fn by_fields() -> KeyPart {
    key::from_fn(|request| {
        let form = if request.may_be_form() { without_mark(request.body()) } else { &[] };
        let found = id(&FORM_STATUS, form, request)?;
        let query = request.uri().query().unwrap_or_default().as_bytes();
        found.map_or_else(|| id(&QUERY_STATUS, query, request), |found| Ok(Some(found)))
    })
}

// Parsed once.
static FORM_STATUS: LazyLock<KeyPart> = LazyLock::new(|| status(key::form));
static QUERY_STATUS: LazyLock<KeyPart> = LazyLock::new(|| status(key::query));

/// The key of the status of a message, a call or a recording.
fn status(field: fn(&str) -> KeyPart) -> KeyPart {
    let call = "AccountSid?|CallSid|CallStatus?|SequenceNumber?|RecordingSid?|RecordingStatus?";
    joined(field, "AccountSid?|MessageSid|MessageStatus or SmsStatus?").or(joined(field, call))
}

/// The SIDs that a status may have beside its own.
const OF_A_STATUS: &str = "AccountSid ApplicationSid CallSid ChannelInstallSid MessageSid \
    MessagingServiceSid OriginalRepliedMessageSid ParentCallSid PhoneNumberSid RecordingSid \
    SmsMessageSid SmsSid TrunkSid";

/// The fields of events that have no SID beside that of their call.
const OF_OTHER_EVENTS: &str = "DialCallStatus PaymentMethod ReferCallStatus SessionId \
    StableSpeechResult UnstableSpeechResult VirtualAgentStatus";

fn is_in(names: &str, name: &str) -> bool {
    names.split(' ').any(|other| other == name)
}

/// Reads the id from pairs `name=value` joined by `&`.
fn id(
    status: &KeyPart,
    pairs: &[u8],
    request: &RequestRef<'_>,
) -> Result<Option<String>, KeyError> {
    let status = status.read(request)?;
    let fields: BTreeSet<_> = form_urlencoded::parse(pairs).collect();
    let has_sid_but = |known: &str| {
        let names = fields.iter().map(|(name, _)| &**name);
        let mut sids = names.filter(|name| name.ends_with("Sid") || name.ends_with("_sid"));
        sids.any(|name| !is_in(known, name))
    };
    let parts = match &status {
        Some(status) => {
            let is_other = |name: &str| name.ends_with("Event") || is_in(OF_OTHER_EVENTS, name);
            if !has_sid_but(OF_A_STATUS) && !fields.iter().any(|(name, _)| is_other(name)) {
                return Ok(Some(status.clone().into_owned()));
            }
            &**status
        }
        None => {
            let account = fields.iter().find(|(name, _)| name == "AccountSid");
            // Twilio states the account beside a field that is named `Sid` only.
            let known = if account.is_some() { "AccountSid" } else { "account_sid Sid" };
            if !has_sid_but(known) {
                return Ok(None);
            }
            account.map_or("", |(_, account)| account)
        }
    };
    // As Twilio signs them: sorted, without separators, equal pairs once. So a separator that an
    // attacker moves makes no other digest.
    let text = fields.iter().filter(|(name, _)| name != "RetryCount");
    let text: String = text.flat_map(|(name, value)| [&**name, &**value]).collect();
    Ok(Some(format!("{parts}|fields_{}", hex(&sha256(text.as_bytes())))))
}

/// Routers run the handler of GET for a HEAD; a HEAD without a key is a probe of the URL.
fn is_probe(request: &RequestRef<'_>) -> bool {
    request.method() == Method::HEAD && matches!(by_fields().read(request), Ok(None))
}
