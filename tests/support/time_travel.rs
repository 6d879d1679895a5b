//! Moves the times in a database back, so that time passes for the store.

use std::time::Duration;

use sqlx::{PgExecutor, SqliteExecutor};

/// Moves all times by this many milliseconds.
pub async fn shift_file(file: impl SqliteExecutor<'_>, by: i64) {
    let update = sqlx::query(
        "UPDATE webhook_deliveries SET lease_until = lease_until + ?1, \
         first_seen_at = first_seen_at + ?1, completed_at = completed_at + ?1, \
         expires_at = expires_at + ?1",
    );
    update.bind(by).execute(file).await.unwrap();
}

/// Moves all times by this many milliseconds, in the schema of the search path.
pub async fn shift_schema(server: impl PgExecutor<'_>, by: i64) {
    let update = sqlx::query(
        "UPDATE webhook_deliveries SET lease_until = lease_until + $1 * interval '1 ms', \
         first_seen_at = first_seen_at + $1 * interval '1 ms', \
         completed_at = completed_at + $1 * interval '1 ms', \
         expires_at = expires_at + $1 * interval '1 ms'",
    );
    update.bind(by).execute(server).await.unwrap();
}

pub fn milliseconds(by: Duration) -> i64 {
    i64::try_from(by.as_millis()).unwrap()
}

/// Moves the times of one packed value and of its expiry. A time that is not set, or that means "never",
/// stays.
///
/// Redis before 7.0 has no PEXPIRETIME.
const SHIFT_KEY: &str = r"
local value, by, never = redis.call('GET', KEYS[1]), tonumber(ARGV[1]), 2^48 - 1
if not value or value:byte(1) ~= 2 then return 0 end
local function moved(at)
    if at == 0 or at == never then return at end
    return math.max(1, math.min(at + by, never))
end
local first_seen_at, expires_at, ends_at = struct.unpack('>I6I6I6', value, 6)
local times = struct.pack('>I6I6I6', moved(first_seen_at), moved(expires_at), moved(ends_at))
redis.call('SET', KEYS[1], value:sub(1, 5) .. times .. value:sub(24), 'KEEPTTL')
local left, now = redis.call('PTTL', KEYS[1]), redis.call('TIME')
-- PTTL and TIME may differ by a millisecond within a script. A key that is purged now must be gone.
local purged_at = now[1] * 1000 + math.floor(now[2] / 1000) + left - 2
if left >= 0 and purged_at < never then
    redis.call('PEXPIREAT', KEYS[1], string.format('%.0f', math.max(1, purged_at + by)))
end
return 1
";

/// Moves all times of the keys with this prefix that one server has, by this many milliseconds. Blocks.
pub(crate) fn shift_redis(connection: &mut redis::Connection, prefix: &str, by: i64) {
    let mut shifts = redis::pipe();
    let own = format!("{prefix}::");
    for key in super::redis::keys_of(connection, prefix).unwrap() {
        // The adapter's own keys hold no packed value.
        if !key.starts_with(own.as_bytes()) {
            shifts.cmd("EVAL").arg(SHIFT_KEY).arg(1).arg(key).arg(by);
        }
    }
    if !shifts.is_empty() {
        shifts.query::<Vec<u8>>(connection).unwrap();
    }
}
