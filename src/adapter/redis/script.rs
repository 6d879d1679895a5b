//! [`Script`]: a Lua script, and [`ScriptCall`]: one call of it over one key.

use std::borrow::Cow;
use std::sync::LazyLock;

use redis::{Arg, Cmd, ToRedisArgs};

/// What every script begins with: it reads the row of the key.
const PRELUDE: &str = include_str!("lua/prelude.lua");
/// For scripts that return stored data: their argument that says which.
const CLAIM_DATA: &str = concat!("local fetch = ARGV[9]\n", include_str!("lua/data.lua"));
const GET_DATA: &str = concat!("local fetch = ARGV[1]\n", include_str!("lua/data.lua"));
/// What a script that writes ends with.
const EPILOGUE: &str = include_str!("lua/epilogue.lua");

/// For scripts that need little memory, or free it soon: a renewal or a completion that is refused at `maxmemory`
/// would lead to a second run.
const ALLOW_OOM: &str = " flags=allow-oom";
const NO_WRITES: &str = " flags=no-writes";

/// Declares scripts. Each is named after its file in the folder `lua`.
macro_rules! scripts {
    ($($name:ident = $before:expr, $file:literal, $after:expr, $flags:expr;)+) => {
        $(pub(super) static $name: LazyLock<Script> =
            LazyLock::new(|| Script::new(&[PRELUDE, $before, include_str!($file), $after], $flags));)+
    };
}

scripts! {
    CLAIM = CLAIM_DATA, "lua/claim.lua", EPILOGUE, "";
    RENEW = "", "lua/renew.lua", EPILOGUE, ALLOW_OOM;
    COMPLETE = "", "lua/complete.lua", EPILOGUE, ALLOW_OOM;
    RELEASE = "", "lua/release.lua", EPILOGUE, ALLOW_OOM;
    FORGET = "", "lua/forget.lua", EPILOGUE, ALLOW_OOM;
    GET = GET_DATA, "lua/get.lua", "", NO_WRITES;
}

/// A Lua script of this crate. Every script reads and writes one key.
#[derive(Debug)]
pub(super) struct Script {
    /// Begins with `#!lua`, and with the script's flags. Needs a server from 7.0 on. A replica, and a
    /// server at `maxmemory`, refuse the whole script before it begins, unless a flag allows it.
    flagged: Text,
    /// Without that line, for servers before 7.0. These refuse the first command that writes, which is
    /// the only one of each script, so nothing is stored either. At `maxmemory` they refuse completions
    /// and releases too.
    plain: Text,
    writes: bool,
}

#[derive(Debug)]
struct Text {
    lua: String,
    sha1: String,
}

impl Text {
    fn new(lua: String) -> Self {
        let sha1 = redis::Script::new(&lua).get_hash().to_owned();
        Self { lua, sha1 }
    }
}

impl Script {
    /// Joins files, without lines of comment and without empty lines.
    fn new(files: &[&str], flags: &str) -> Self {
        let is_code = |line: &&str| !line.is_empty() && !line.trim_start().starts_with("--");
        let lines = files.iter().flat_map(|file| file.lines()).filter(is_code);
        let lua = lines.collect::<Vec<_>>().join("\n");
        let flagged = Text::new(format!("#!lua{flags}\n{lua}"));
        Self { flagged, plain: Text::new(lua), writes: flags != NO_WRITES }
    }
}

/// One call of a script. Repeated as it is, it has the same effect.
#[derive(Debug, Clone)]
pub(super) struct ScriptCall {
    script: &'static Script,
    /// For a server that knows the flags, by the script's hash.
    command: Cmd,
}

impl ScriptCall {
    /// `key` is the key of Redis.
    pub(super) fn new(script: &'static Script, key: &str) -> Self {
        let mut command = Cmd::with_capacity(16, 320);
        command.arg("EVALSHA").arg(&script.flagged.sha1).arg(1).arg(key);
        Self { script, command }
    }

    pub(super) fn arg(mut self, arg: impl ToRedisArgs) -> Self {
        self.command.arg(arg);
        self
    }

    pub(super) fn writes(&self) -> bool {
        self.script.writes
    }

    /// Returns the call by the script's hash, or with its text, for a server that does not know the hash.
    pub(super) fn command(&self, knows_flags: bool, by_hash: bool) -> Cow<'_, Cmd> {
        let (name, script) = match (knows_flags, by_hash) {
            (true, true) => return Cow::Borrowed(&self.command),
            (false, true) => ("EVALSHA", &self.script.plain.sha1),
            (true, false) => ("EVAL", &self.script.flagged.lua),
            (false, false) => ("EVAL", &self.script.plain.lua),
        };
        let mut command = redis::cmd(name);
        command.arg(script);
        for arg in self.command.args_iter().skip(2) {
            if let Arg::Simple(arg) = arg {
                command.arg(arg);
            }
        }
        Cow::Owned(command)
    }
}
