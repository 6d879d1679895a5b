//! Reads the senders' secrets from the environment.

use std::collections::BTreeMap;
use std::ffi::OsString;

use tower_dedup::provider;

use super::shared::signature::{Check, Scheme, any_of};

const PREFIX: &str = "WEBHOOK_SECRET_";
/// The suffix for the previous secret, while a secret changes.
const PREVIOUS: &str = "_PREVIOUS";

/// Returns the checks of all senders with a secret in these variables, by the preset's name.
///
/// A variable for an unknown sender is an error, and so is one for a sender without a scheme. Otherwise
/// a route that was meant to be verified would pass every request.
pub(crate) fn checks(
    variables: impl IntoIterator<Item = (OsString, OsString)>,
    public_url: Option<&str>,
) -> Result<BTreeMap<&'static str, Check>, String> {
    let mut checks = BTreeMap::<_, Vec<Check>>::new();
    for (variable, secret) in variables {
        let Some(variable) = variable.to_str() else { continue };
        let Some(sender) = variable.strip_prefix(PREFIX) else { continue };
        let sender = sender.strip_suffix(PREVIOUS).unwrap_or(sender);
        let known = senders().find(|(name, _)| variable_of(name) == [PREFIX, sender].concat());
        let Some((name, scheme)) = known else {
            let known: Vec<_> = senders().map(|(name, _)| variable_of(name)).collect();
            return Err(format!(
                "{variable}: this receiver cannot verify such a sender; it knows {}",
                known.join(", ")
            ));
        };
        // No error message contains the secret.
        let secret = secret.to_str().ok_or_else(|| format!("{variable} is not UTF-8"))?;
        let check = scheme.check(secret, public_url);
        checks.entry(name).or_default().push(check.map_err(|why| format!("{variable}: {why}"))?);
    }
    Ok(checks.into_iter().map(|(name, checks)| (name, any_of(checks))).collect())
}

/// Returns the senders with a preset and a scheme.
fn senders() -> impl Iterator<Item = (&'static str, Scheme)> {
    provider::ALL.iter().filter_map(|preset| Some((preset.name(), Scheme::of(preset.name())?)))
}

/// Returns `WEBHOOK_SECRET_STANDARD_WEBHOOKS` for `standard-webhooks`.
fn variable_of(sender: &str) -> String {
    [PREFIX, &sender.to_ascii_uppercase().replace('-', "_")].concat()
}
