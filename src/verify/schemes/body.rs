//! Schemes that sign the body and no time: HMAC-SHA256.

use crate::verify::error::Refusal;
use crate::verify::received::{HmacSha256, Received, base64, hex, signed};

/// GitHub and Meta: hexadecimal after `sha256=`.
pub(in crate::verify) fn github(key: &[u8], request: &Received<'_>) -> Result<(), Refusal> {
    let signature = request.header("x-hub-signature-256")?.strip_prefix("sha256=").and_then(hex);
    signed::<HmacSha256>(key, &[request.body], signature)
}

/// Gitea and Forgejo: hexadecimal.
pub(in crate::verify) fn gitea(key: &[u8], request: &Received<'_>) -> Result<(), Refusal> {
    signed::<HmacSha256>(key, &[request.body], hex(request.header("x-gitea-signature")?))
}

/// Shopify: base64.
pub(in crate::verify) fn shopify(key: &[u8], request: &Received<'_>) -> Result<(), Refusal> {
    signed::<HmacSha256>(key, &[request.body], base64(request.header("x-shopify-hmac-sha256")?))
}

/// CircleCI: hexadecimal after `v1=`, in a list of versions.
pub(in crate::verify) fn circleci(key: &[u8], request: &Received<'_>) -> Result<(), Refusal> {
    let versions = request.header("circleci-signature")?.split(',');
    let signatures = versions.filter_map(|item| hex(item.trim().strip_prefix("v1=")?));
    signed::<HmacSha256>(key, &[request.body], signatures)
}
