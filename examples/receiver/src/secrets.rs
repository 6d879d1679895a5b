//! Reads the senders' secrets from the environment.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ffi::OsString;

use tower_dedup::provider::{self, Preset};
use tower_dedup::verify::{EchoLayer, Verifier, VerifierError};

const PREFIX: &str = "WEBHOOK_SECRET_";
/// The suffix for the previous secret, while a secret changes.
const PREVIOUS: &str = "_PREVIOUS";

/// Returns the verifiers of all senders with a secret in these variables, by the preset's name.
///
/// A variable for an unknown sender is an error, and so is one for a sender without a scheme. Otherwise
/// a route that was meant to be verified would pass every request.
pub(crate) fn verifiers(
    variables: impl IntoIterator<Item = (OsString, OsString)>,
    public_url: Option<&str>,
) -> Result<BTreeMap<&'static str, Verifier>, String> {
    let mut verifiers = BTreeMap::new();
    for (variable, secret) in variables {
        let Some(variable) = variable.to_str() else { continue };
        let Some(sender) = variable.strip_prefix(PREFIX) else { continue };
        let sender = sender.strip_suffix(PREVIOUS).unwrap_or(sender);
        let known = senders().find(|preset| variable_of(preset) == [PREFIX, sender].concat());
        let Some(preset) = known else {
            let known: Vec<_> = senders().map(variable_of).collect();
            return Err(format!(
                "{variable}: this receiver cannot verify such a sender; it knows {}",
                known.join(", ")
            ));
        };
        // No error message contains the secret.
        let secret = secret.to_str().ok_or_else(|| format!("{variable} is not UTF-8"))?;
        let explained = |why| match why {
            VerifierError::NoPublicUrl => format!("{variable}: {why}: set --public-url"),
            _ => format!("{variable}: {why}"),
        };
        match verifiers.entry(preset.name()) {
            Entry::Vacant(entry) => {
                let verifier = match public_url {
                    Some(url) => preset.verifier_at(url, secret),
                    None => preset.verifier(secret),
                };
                entry.insert(verifier.map_err(explained)?);
            }
            Entry::Occupied(mut entry) => {
                let both = entry.get().clone().or_secret(secret).map_err(explained)?;
                entry.insert(both);
            }
        }
    }
    Ok(verifiers)
}

/// Returns the layer that answers the sender's handshakes. Meta's need a token of their own, which the receiver does not
/// have.
#[allow(dead_code, reason = "the tests of this file have no route")]
pub(crate) fn echo(preset: &Preset) -> Option<EchoLayer> {
    let secret = std::env::var(variable_of(preset)).ok().filter(|_| *preset == provider::ZOOM);
    preset.echo(secret.as_deref()).ok()
}

/// Returns the presets with a scheme.
fn senders() -> impl Iterator<Item = &'static Preset> {
    provider::ALL.iter().filter(|preset| preset.scheme().is_some())
}

/// Returns `WEBHOOK_SECRET_STANDARD_WEBHOOKS` for `standard-webhooks`.
fn variable_of(preset: &Preset) -> String {
    [PREFIX, &preset.name().to_ascii_uppercase().replace('-', "_")].concat()
}
