//! The secrets of the example `receiver`.

#[path = "../../examples/receiver/src/secrets.rs"]
mod secrets;

use std::collections::BTreeMap;

use tower_dedup::verify::Verifier;

use crate::vectors::{VECTORS, at, cases};

fn verifiers(
    variables: &[(&str, &str)],
    public_url: Option<&str>,
) -> Result<BTreeMap<&'static str, Verifier>, String> {
    let variables = variables.iter().map(|(name, secret)| ((*name).into(), (*secret).into()));
    secrets::verifiers(variables, public_url)
}

#[test]
fn receiver_finds_the_scheme_of_each_secret() {
    let secrets = [
        ("PATH", "/bin"),
        ("WEBHOOK_SECRET_GITHUB", "new"),
        ("WEBHOOK_SECRET_GITHUB_PREVIOUS", "mysecret"),
        ("WEBHOOK_SECRET_STANDARD_WEBHOOKS", "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"),
    ];
    let found = verifiers(&secrets, None).unwrap();
    assert_eq!(found.keys().copied().collect::<Vec<_>>(), ["github", "standard-webhooks"]);
    let vector = cases(VECTORS[2].1).remove(1);
    let (head, body) = (vector.head(), vector.body_utf8.as_bytes());
    assert_eq!(found["github"].verify(&head, body, at(0)), Ok(()));

    for (variable, secret, public_url, why) in [
        ("WEBHOOK_SECRET_NOBODY", "secret", None, "it knows WEBHOOK_SECRET_STANDARD_WEBHOOKS, "),
        ("WEBHOOK_SECRET_", "secret", None, "cannot verify such a sender"),
        ("WEBHOOK_SECRET_github", "secret", None, "cannot verify such a sender"),
        ("WEBHOOK_SECRET_GITHUB", "", None, "is empty"),
        ("WEBHOOK_SECRET_STANDARD_WEBHOOKS", "whsec_", None, "is empty"),
        ("WEBHOOK_SECRET_STANDARD_WEBHOOKS", "whsec_secret!", None, "base64"),
        ("WEBHOOK_SECRET_TWILIO", "secret", None, "--public-url"),
    ] {
        let said = verifiers(&[(variable, secret)], public_url).expect_err(variable);
        assert!(said.contains(why) && said.contains(variable), "{said}");
        assert!(
            secret.is_empty() || !said.contains("secret!"),
            "the message contains no secret: {said}"
        );
    }
    assert_eq!(verifiers(&[], None).unwrap().len(), 0);
    assert!(verifiers(&[("WEBHOOK_SECRET_TWILIO", "x")], Some("https://example.com")).is_ok());
}
