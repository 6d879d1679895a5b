//! Who may see the page, the effects and the metrics, and press the buttons.

use std::net::IpAddr;

use axum::extract::{Request, State};
use axum::http::header::HOST;
use axum::http::uri::Authority;
use axum::http::{StatusCode, Uri};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

/// Refuses a request under a foreign host name with 403.
///
/// A foreign site can let its own name resolve to 127.0.0.1 (DNS rebinding). A browser then sends that
/// site's requests here, and both `Origin` and `Host` have that name. An attacker cannot use an IP
/// address or `localhost` so. `public` is the authority of `--public-url`.
pub(crate) async fn known_host(
    State(public): State<Option<Authority>>,
    request: Request,
    next: Next,
) -> Response {
    let host = request.headers().get(HOST).and_then(|host| host.to_str().ok()?.parse().ok());
    let host: Option<Authority> = host.or_else(|| request.uri().authority().cloned());
    if host.is_some_and(|host| is_local(&host) || Some(host) == public) {
        return next.run(request).await;
    }
    let text = "this is served under an IP address, localhost or --public-url only\n";
    (StatusCode::FORBIDDEN, text).into_response()
}

fn is_local(host: &Authority) -> bool {
    let name = host.host().trim_start_matches('[').trim_end_matches(']');
    name == "localhost" || name.parse::<IpAddr>().is_ok()
}

/// Returns the authority of `--public-url`.
pub(crate) fn authority(public_url: Option<&str>) -> Option<Authority> {
    public_url?.parse::<Uri>().ok()?.into_parts().authority
}
