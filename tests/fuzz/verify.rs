//! Signatures: nothing is verified that the sender did not sign.

use std::collections::BTreeSet;
use std::sync::LazyLock;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::{HeaderName, HeaderValue, Request};
use tower_dedup::provider::{self, Preset};
use tower_dedup::testing;
use tower_dedup::verify::Verifier;

use crate::fuzz::fuzz;
use crate::input::Input;
use support::secrets::test_secrets;

const URL: &str = "https://example.com";
/// The headers of a signed request of each sender, in alphabetic order.
static NAMES: LazyLock<Vec<HeaderName>> = LazyLock::new(|| {
    let signed = |sender: Preset| {
        let private = test_secrets(sender.scheme())[1];
        testing::sign_at(testing::request(sender, "/hook", "1"), sender, URL, private)
    };
    let requests = senders().into_iter().map(signed);
    let names: BTreeSet<_> = requests
        .flat_map(|request| request.headers().keys().map(ToString::to_string).collect::<Vec<_>>())
        .collect();
    names.iter().map(|name| name.parse().unwrap()).collect()
});

fn now() -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(1_753_900_006)
}

/// The senders with a known scheme.
fn senders() -> Vec<Preset> {
    provider::ALL.iter().copied().filter(|preset| preset.scheme().is_some()).collect()
}

fn verifier(sender: Preset) -> Verifier {
    sender.verifier_at(URL, test_secrets(sender.scheme())[0]).unwrap()
}

/// Any headers and any body are refused, because nobody signed them.
#[test]
fn verify_any() {
    fuzz("verify_any", 4_000, &[], |input| {
        let mut input = Input(input);
        let sender = *input.pick(&senders());
        let mut request = Request::post("/hook?a=b").body(()).unwrap();
        for _ in 0..input.byte() % 6 {
            let name = input.pick(&NAMES).clone();
            if let Ok(value) = HeaderValue::from_bytes(input.bytes()) {
                request.headers_mut().append(name, value);
            }
        }
        let (head, ()) = request.into_parts();
        assert!(verifier(sender).verify(&head, input.0, now()).is_err(), "{sender:?}");
    });
}
