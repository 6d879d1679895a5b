//! The cryptographic provider of encrypted connections by rustls.

use crate::error::ConfigError;

/// Sees that the process has a cryptographic provider, because `redis` takes that of the process. Without one,
/// rustls panics if the crates of the program have brought none, or two.
///
/// A provider that is there stays.
///
/// # Errors
///
/// If there is none, and the features have none either.
pub(super) fn provide() -> Result<(), ConfigError> {
    #[cfg(feature = "tls-rustls-no-provider")]
    if rustls::crypto::CryptoProvider::get_default().is_none() {
        // With both features, `sqlx` takes ring.
        #[cfg(feature = "tls-rustls-ring")]
        let provider = Some(rustls::crypto::ring::default_provider());
        #[cfg(all(feature = "tls-rustls-aws-lc-rs", not(feature = "tls-rustls-ring")))]
        let provider = Some(rustls::crypto::aws_lc_rs::default_provider());
        #[cfg(not(any(feature = "tls-rustls-ring", feature = "tls-rustls-aws-lc-rs")))]
        let provider: Option<rustls::crypto::CryptoProvider> = None;
        // Another task may have installed one just now.
        let _ = provider.ok_or_else(no_provider)?.install_default();
    }
    Ok(())
}

#[cfg(feature = "tls-rustls-no-provider")]
fn no_provider() -> ConfigError {
    ConfigError::setting("CryptoProvider", "installed before the first encrypted connection")
}
