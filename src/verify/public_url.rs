//! [`PublicUrl`]: the URL of this server as the sender knows it.

use std::borrow::Cow;

use http::Uri;
use http::uri::PathAndQuery;

use super::error::VerifierError;
use crate::provider::scheme::Scheme;

/// The public URL of a server, without the path.
///
/// A server behind a proxy sees another scheme, host or port, and a client can forge headers such
/// as `X-Forwarded-Host`. So the public URL is configured.
#[derive(Clone)]
pub(super) struct PublicUrl(String);

impl PublicUrl {
    pub(super) fn parse(url: &str) -> Result<Self, VerifierError> {
        let host = url.strip_prefix("https://").or_else(|| url.strip_prefix("http://"));
        match host.map(|rest| rest.trim_end_matches('/')) {
            Some(rest) if !rest.is_empty() && !rest.contains(['?', '#']) => {
                Ok(Self(url.trim_end_matches('/').to_owned()))
            }
            _ => Err(VerifierError::InvalidPublicUrl),
        }
    }

    pub(super) fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the URL without its port and with it.
    pub(super) fn with_and_without_port(&self) -> [String; 2] {
        let (scheme, rest) = self.0.split_once("://").unwrap_or(("https", &self.0));
        let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let standard = if scheme == "http" { "80" } else { "443" };
        let (host, port) = match authority.rsplit_once(':') {
            // In `[::1]`, the text after the last colon is no number.
            Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => (host, port),
            _ => (authority, standard),
        };
        [format!("{scheme}://{host}{path}"), format!("{scheme}://{host}:{port}{path}")]
    }
}

/// Returns what follows the public URL in the URL of a request.
pub(super) fn target(uri: &Uri) -> &str {
    uri.path_and_query().map_or("/", PathAndQuery::as_str)
}

/// Returns what may follow the public URL in the signed URL: the request's target and, if its path
/// is `/`, the target without this slash; for HubSpot, each with a decoded query, too.
///
/// The sender signs the URL that is configured there, and that of `/square` ends without a slash.
/// Every path on the wire begins with one: that of `https://example.com`, and what a proxy or
/// axum's `nest` leaves of `/square`.
pub(super) fn targets<'a>(uri: &'a Uri, scheme: &Scheme) -> Vec<Cow<'a, str>> {
    let mut targets = vec![Cow::from(target(uri))];
    if scheme.signs_url() {
        let without_slash = target(uri).strip_prefix('/').filter(|_| uri.path() == "/");
        targets.extend(without_slash.map(Cow::from));
    }
    if scheme.decodes_query {
        targets.extend(targets.clone().iter().map(|target| with_decoded_query(target).into()));
    }
    targets
}

/// Decodes the characters in the query that HubSpot's page lists, and leaves the others encoded.
/// HubSpot's libraries decode none. A decoded `/` or `?` of the path would make it another path.
fn with_decoded_query(target: &str) -> String {
    let (path, query) = target.split_at(target.find('?').unwrap_or(target.len()));
    let query = ":/?@!$'()*,;".chars().fold(query.to_owned(), |query, character| {
        let (code, plain) = (u32::from(character), character.to_string());
        query.replace(&format!("%{code:02X}"), &plain).replace(&format!("%{code:02x}"), &plain)
    });
    [path, &query].concat()
}
