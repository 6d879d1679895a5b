//! Twilio's keys, from constructed parameters by POST and by GET.

use bytes::Bytes;
use http::Request;
use tower_dedup::provider;

use crate::cases::{Outcome, outcome};

#[test]
fn twilio_keys_contain_the_status_and_prefer_that_of_a_message() {
    for (parameters, key) in [
        ("CallSid=CA1", "|CA1||||"),
        ("AccountSid=AC1&CallSid=CA1&CallStatus=ringing", "AC1|CA1|ringing|||"),
        (
            "AccountSid=AC1&CallSid=CA1&CallStatus=in-progress&SequenceNumber=2",
            "AC1|CA1|in-progress|2||",
        ),
        (
            "AccountSid=AC1&CallSid=CA1&RecordingSid=RE1&RecordingStatus=completed",
            "AC1|CA1|||RE1|completed",
        ),
        // A value with the separator in it.
        ("AccountSid=AC1&CallSid=CA1%7Cringing", "AC1|CA1%7Cringing||||"),
        ("AccountSid=AC1&MessageSid=SM1&MessageStatus=sent&SmsStatus=queued", "AC1|SM1|sent"),
        ("AccountSid=AC1&MessageSid=SM1&SmsStatus=received", "AC1|SM1|received"),
        ("MessageSid=SM1", "|SM1|"),
        // A message precedes a call if both are present.
        ("AccountSid=AC1&CallSid=CA1&MessageSid=SM1", "AC1|SM1|"),
    ] {
        let form = Request::post("/voice")
            .header("content-type", "application/x-www-form-urlencoded")
            .body(parameters)
            .unwrap();
        let query = Request::get(format!("/voice?{parameters}")).body("").unwrap();
        for request in [form, query] {
            let (head, body) = request.into_parts();
            let found = outcome(provider::TWILIO, &head, &Bytes::from(body));
            assert_eq!(found, Outcome::Key { key: key.to_owned() }, "{parameters}");
        }
    }
}
