//! Connection URLs: those that name one host.
//!
//! libpq takes several hosts and chooses between them. sqlx takes a list of hosts for one name, and
//! ignores the parameters that choose, with a warning.

use std::str::FromStr;

use sqlx::postgres::PgConnectOptions;

use crate::error::ConfigError;

/// The parameters by which libpq chooses between servers.
const CHOOSES: [&str; 2] = ["target_session_attrs", "load_balance_hosts"];

/// Reads a URL.
pub(super) fn options(url: &str) -> Result<PgConnectOptions, ConfigError> {
    let rest = url.strip_prefix("postgres://").or_else(|| url.strip_prefix("postgresql://"));
    let rest = rest.ok_or(ConfigError::InvalidUrl)?;
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    let authority = rest.split('/').next().unwrap_or(rest);
    // Several ports or addresses are no number and no address to sqlx: its error would not say why.
    let hosts = authority.rsplit('@').next().unwrap_or(authority);
    let mut several = hosts.contains(',') || hosts.contains("%2C") || hosts.contains("%2c");
    for (name, value) in form_urlencoded::parse(query.as_bytes()) {
        if let Some(name) = CHOOSES.into_iter().find(|chooses| *chooses == name) {
            return Err(ConfigError::UnsupportedUrlParameter(name));
        }
        several |= matches!(&*name, "host" | "hostaddr" | "port") && value.contains(',');
    }
    if several {
        return Err(ConfigError::SeveralHosts);
    }
    let options = PgConnectOptions::from_str(url).map_err(|_| ConfigError::InvalidUrl)?;
    // A URL without a host leaves it to `PGHOST`.
    if options.get_socket().is_none() && options.get_host().contains(',') {
        return Err(ConfigError::SeveralHosts);
    }
    Ok(options)
}
