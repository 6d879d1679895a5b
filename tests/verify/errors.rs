//! What cannot be a verifier, and what no text shows.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use tower_dedup::provider::{self, Preset};
use tower_dedup::verify::{Part, Refusal, Scheme, VerifierError, VerifyLayer};

use crate::vectors::{genuine, senders};
use support::secrets::test_secrets;

#[test]
fn preset_without_a_scheme_is_refused_with_those_that_have_one() {
    let error = provider::POSTMARK.verifier("secret").unwrap_err();
    assert!(matches!(error, VerifierError::NoScheme("postmark")), "{error:?}");
    let text = error.to_string();
    for sender in senders() {
        assert!(text.contains(sender.name()), "{text}");
        assert_eq!(provider::find(sender.name()), Some(sender));
    }
    assert!(provider::POSTMARK.verifier_at("https://example.com", "secret").is_err());
}

#[test]
fn secret_without_the_form_of_its_scheme_is_refused() {
    let malformed = |sender: Preset, secret: &str| {
        let error = sender.verifier_at("https://example.com", secret).unwrap_err();
        assert!(matches!(error, VerifierError::MalformedSecret(_)), "{sender:?}: {error:?}");
        assert!(!error.to_string().contains(secret), "{error}");
        let valid =
            sender.verifier_at("https://example.com", test_secrets(sender.scheme())[0]).unwrap();
        assert_eq!(valid.or_secret(secret).unwrap_err(), error);
    };
    for (sender, secret) in [
        (provider::STANDARD_WEBHOOKS, "whsec_secret!"),
        (provider::SVIX, "abc"),
        (provider::ADYEN, "44782DEF5"),
        (provider::ADYEN, "44782DEG"),
        (provider::TELEGRAM, "a secret"),
        (provider::SENDGRID, "MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAE"),
        (provider::SENDGRID, "s3cr3t"),
        // An encoded secret is made by a program, which makes none of less than 16 bytes: most of it is missing.
        (provider::STANDARD_WEBHOOKS, "whsec_AA=="),
        (provider::STANDARD_WEBHOOKS, "v1,whsec_AA=="),
        (provider::STANDARD_WEBHOOKS, "AAAA"),
        (provider::SVIX, "whsec_AAAAAAAAAAAAAAAAAAAA"),
        (provider::ADYEN, "44"),
        (provider::ADYEN, "44782DEF547AAA06C910C43932B1EB"),
    ] {
        malformed(sender, secret);
    }
    assert!(provider::SVIX.verifier("whsec_AAAAAAAAAAAAAAAAAAAAAA==").is_ok());
    assert!(provider::ADYEN.verifier("44782DEF547AAA06C910C43932B1EB0C").is_ok());
    // People choose these.
    for sender in [provider::GITHUB, provider::GITLAB, provider::TELEGRAM, provider::STRIPE] {
        assert!(sender.verifier("x").is_ok(), "{sender:?}");
    }
    malformed(provider::TELEGRAM, &"a".repeat(257));
    for sender in senders() {
        let url = "https://example.com";
        malformed(sender, &format!("{}\n", test_secrets(sender.scheme())[0]));
        for empty in ["", "whsec_"] {
            let error = sender.verifier_at(url, empty).unwrap_err();
            assert_eq!(error, VerifierError::EmptySecret, "{sender:?}");
        }
    }
}

/// Each is a public key of order 1, 2, 4 or 8 (RFC 7748, section 7): some signature of it holds for many texts.
#[test]
fn public_key_of_small_order_is_refused() {
    const ORDERS: [&str; 8] = [
        "0100000000000000000000000000000000000000000000000000000000000000",
        "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "0000000000000000000000000000000000000000000000000000000000000000",
        "0000000000000000000000000000000000000000000000000000000000000080",
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc85",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac03fa",
    ];
    let own = Scheme::ed25519("x-signature", &[Part::Body]);
    for key in ORDERS {
        let encoded = STANDARD.encode(base16ct::lower::decode_vec(key).unwrap());
        let refused = VerifierError::MalformedSecret("a public key of Ed25519");
        assert_eq!(provider::DISCORD.verifier(key).unwrap_err(), refused, "{key}");
        assert_eq!(own.verifier(key).unwrap_err(), refused, "{key}");
        let webhook = provider::STANDARD_WEBHOOKS.verifier(format!("whpk_{encoded}"));
        assert_eq!(webhook.unwrap_err(), refused, "{key}");
    }
}

#[test]
fn scheme_that_signs_the_url_needs_a_public_url() {
    let url_signed = [provider::SQUARE, provider::TWILIO, provider::HUBSPOT];
    for sender in senders() {
        let secret = test_secrets(sender.scheme())[0];
        let without = sender.verifier(secret).err();
        assert_eq!(without, url_signed.contains(&sender).then_some(VerifierError::NoPublicUrl));
        for url in ["", "example.com", "https://", "https:///", "https://a?b", "https://a#b"] {
            let error = sender.verifier_at(url, secret).unwrap_err();
            assert_eq!(error, VerifierError::InvalidPublicUrl, "{url}");
        }
    }
}

#[test]
fn debug_shows_no_secret() {
    for (sender, case) in genuine() {
        let verifier = case.verifier(sender);
        let shown = format!("{verifier:?} {:?}", VerifyLayer::new(verifier.clone()));
        assert!(shown.contains("keys: 1") && shown.contains(sender.name()), "{shown}");
        let secret = case.secret.trim_start_matches("whsec_");
        assert!(!shown.contains(secret), "{shown}");
        let key: Vec<_> = secret.bytes().map(|byte| byte.to_string()).collect();
        assert!(!shown.contains(&key.join(", ")), "{shown}");
    }
    assert_eq!(Refusal::Missing("x-header").to_string(), "x-header is missing");
}
