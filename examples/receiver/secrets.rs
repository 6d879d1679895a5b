//! The secrets of the senders, from the environment.

use std::collections::BTreeMap;
use std::ffi::OsString;

use tower_dedup::provider;

use super::shared::signature::{Check, Scheme, any_of};

const PREFIX: &str = "WEBHOOK_SECRET_";
/// While a secret is changed, the one before it.
const PREVIOUS: &str = "_PREVIOUS";

/// The check for each sender that these variables hold a secret for, by its preset's name.
///
/// A variable that is for no sender is an error, and so is a sender that nobody here can verify: a
/// route that was meant to be verified and is not would let everything pass.
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
        // The secret itself is never said, whatever is wrong with it.
        let secret = secret.to_str().ok_or_else(|| format!("{variable} is not UTF-8"))?;
        let check = scheme.check(secret, public_url);
        checks.entry(name).or_default().push(check.map_err(|why| format!("{variable}: {why}"))?);
    }
    Ok(checks.into_iter().map(|(name, checks)| (name, any_of(checks))).collect())
}

/// The senders that have a preset, and a scheme that there is a function for.
fn senders() -> impl Iterator<Item = (&'static str, Scheme)> {
    provider::ALL.iter().filter_map(|preset| Some((preset.name(), Scheme::of(preset.name())?)))
}

/// `WEBHOOK_SECRET_STANDARD_WEBHOOKS` for `standard-webhooks`.
fn variable_of(sender: &str) -> String {
    [PREFIX, &sender.to_ascii_uppercase().replace('-', "_")].concat()
}
