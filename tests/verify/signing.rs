//! `Preset::sign` signs as the senders do.

use bytes::Bytes;
use http::Request;
use tower_dedup::provider::Preset;

use crate::vectors::{VECTORS, at, cases, signature_header};

/// Signing a vector again gives the published signature, if time and URL have one form only.
#[test]
fn vectors_are_signed_as_published() {
    let mut other = Vec::new();
    for (sender, json, ..) in VECTORS {
        // The vectors have no private key.
        if matches!(sender.name(), "sendgrid" | "discord" | "adyen") {
            continue;
        }
        for case in cases(json).into_iter().filter(|case| case.valid) {
            let (head, body) = case.request().into_parts();
            drop(body);
            let request = Request::from_parts(head.clone(), Bytes::from(case.body_utf8.clone()));
            let time = match sender.name() {
                "slack" | "hubspot" => case.now(),
                _ => signed_time(*sender, &case.headers).unwrap_or(case.now()),
            };
            let url = case.public_url();
            let again =
                sender.scheme().unwrap().sign(&case.secret, Some(&url), at(time), request).unwrap();
            let header = signature_header(*sender);
            let published = head.headers[&header].to_str().unwrap();
            let own = again.headers()[&header].to_str().unwrap();
            if !published.contains(own) {
                other.push(case.name);
            }
        }
    }
    // Fractions of a second, decoded URLs and offsets have other forms too.
    assert_eq!(other, ["notification", "encoded-query", "primary-key", "secondary-key"]);
}

fn signed_time(
    sender: Preset,
    headers: &std::collections::BTreeMap<String, String>,
) -> Option<i64> {
    let (name, start) = match sender.name() {
        "standard-webhooks" => ("webhook-timestamp", ""),
        "svix" => ("svix-timestamp", ""),
        "stripe" => ("stripe-signature", "t="),
        "paddle" => ("paddle-signature", "ts="),
        _ => return None,
    };
    let (_, value) = headers.iter().find(|(header, _)| header.eq_ignore_ascii_case(name))?;
    value.strip_prefix(start)?.split([',', ';']).next()?.parse().ok()
}
