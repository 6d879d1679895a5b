//! What cannot be a verifier, and what no text shows.

use tower_dedup::provider;
use tower_dedup::verify::{Refusal, Scheme, VerifierError, VerifyLayer};

use crate::vectors::genuine;

#[test]
fn preset_without_a_scheme_is_refused_with_those_that_have_one() {
    let error = provider::POSTMARK.verifier("secret").unwrap_err();
    assert!(matches!(error, VerifierError::NoScheme { preset: "postmark", .. }), "{error:?}");
    let text = error.to_string();
    for scheme in Scheme::ALL {
        assert!(text.contains(scheme.name()), "{text}");
        let preset = provider::find(scheme.name()).expect("a preset");
        assert_eq!(preset.scheme(), Some(*scheme));
    }
    assert!(provider::POSTMARK.verifier_at("https://example.com", "secret").is_err());
}

/// The guide and the layer's warning rely on it.
#[test]
fn scheme_and_preset_agree_whether_the_id_is_signed() {
    for preset in provider::ALL {
        let Some(scheme) = preset.scheme() else { continue };
        if preset.name() != "twilio-by-token" {
            assert_eq!(scheme.signs_id(), preset.signed_id(), "{preset:?}");
        }
    }
}

#[test]
fn secret_without_the_form_of_its_scheme_is_refused() {
    let malformed = |scheme: Scheme, secret: &str| {
        let error = scheme.verifier_at("https://example.com", secret).unwrap_err();
        assert!(matches!(error, VerifierError::MalformedSecret { .. }), "{scheme:?}: {error:?}");
        assert!(!error.to_string().contains(secret), "{error}");
        let valid = scheme.verifier_at("https://example.com", scheme.test_secrets()[0]).unwrap();
        assert_eq!(valid.or_secret(secret).unwrap_err(), error);
    };
    for (scheme, secret) in [
        (Scheme::StandardWebhooks, "whsec_secret!"),
        (Scheme::Svix, "abc"),
        (Scheme::Adyen, "44782DEF5"),
        (Scheme::Adyen, "44782DEG"),
        (Scheme::Telegram, "a secret"),
        (Scheme::SendGrid, "MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAE"),
        (Scheme::SendGrid, "s3cr3t"),
    ] {
        malformed(scheme, secret);
    }
    malformed(Scheme::Telegram, &"a".repeat(257));
    for scheme in Scheme::ALL {
        let url = "https://example.com";
        malformed(*scheme, &format!("{}\n", scheme.test_secrets()[0]));
        for empty in ["", "whsec_"] {
            let error = scheme.verifier_at(url, empty).unwrap_err();
            assert_eq!(error, VerifierError::EmptySecret, "{scheme:?}");
        }
    }
}

#[test]
fn scheme_that_signs_the_url_needs_a_public_url() {
    for scheme in Scheme::ALL {
        let secret = scheme.test_secrets()[0];
        let without = scheme.verifier(secret).err();
        assert_eq!(without, scheme.signs_url().then_some(VerifierError::NoPublicUrl));
        for url in ["", "example.com", "https://", "https:///", "https://a?b", "https://a#b"] {
            let error = scheme.verifier_at(url, secret).unwrap_err();
            assert_eq!(error, VerifierError::InvalidPublicUrl, "{url}");
        }
    }
    let url_signed = Scheme::ALL.iter().filter(|scheme| scheme.signs_url());
    assert!(url_signed.eq(&[Scheme::Square, Scheme::Twilio, Scheme::HubSpot]));
}

#[test]
fn debug_shows_no_secret() {
    for (scheme, case) in genuine() {
        let verifier = case.verifier(scheme);
        let shown = format!("{verifier:?} {:?}", VerifyLayer::new(verifier.clone()));
        assert!(shown.contains("keys: 1") && shown.contains(&format!("{scheme:?}")), "{shown}");
        let secret = case.secret.trim_start_matches("whsec_");
        assert!(!shown.contains(secret), "{shown}");
        let key: Vec<_> = secret.bytes().map(|byte| byte.to_string()).collect();
        assert!(!shown.contains(&key.join(", ")), "{shown}");
    }
    assert_eq!(Refusal::Missing("x-header").to_string(), "x-header is missing");
}
