//! [`Script`]: a Lua script, and [`ScriptCall`]: one call of it over one key.

use std::sync::LazyLock;

use redis::{Arg, Cmd, ToRedisArgs};

/// What every script begins with: it reads the row of the key.
const PRELUDE: &str = include_str!("lua/prelude.lua");
/// For scripts that return stored data: their argument that says which.
const CLAIM_DATA: &str = concat!("local fetch = ARGV[9]\n", include_str!("lua/data.lua"));
const GET_DATA: &str = concat!("local fetch = ARGV[1]\n", include_str!("lua/data.lua"));
/// What a script that writes ends with.
const EPILOGUE: &str = include_str!("lua/epilogue.lua");

/// Declares scripts. Each is named after its file in the folder `lua`.
macro_rules! scripts {
    ($($name:ident = $before:expr, $file:literal, $after:expr;)+) => {
        $(pub(super) static $name: LazyLock<Script> =
            LazyLock::new(|| Script::new(&[PRELUDE, $before, include_str!($file), $after]));)+
    };
}

scripts! {
    CLAIM = CLAIM_DATA, "lua/claim.lua", EPILOGUE;
    RENEW = "", "lua/renew.lua", EPILOGUE;
    COMPLETE = "", "lua/complete.lua", EPILOGUE;
    RELEASE = "", "lua/release.lua", EPILOGUE;
    FORGET = "", "lua/forget.lua", EPILOGUE;
    GET = GET_DATA, "lua/get.lua", "";
}

/// A Lua script of this crate. Every script reads one key, and writes it by its last command, so a
/// script that fails has written nothing.
///
/// No script has a line of flags (`#!lua`), which servers before 7.0 do not know: see
/// `lua/epilogue.lua`.
#[derive(Debug)]
pub(super) struct Script {
    lua: String,
    sha1: String,
    writes: bool,
}

impl Script {
    /// Joins files, without lines of comment and without empty lines.
    fn new(files: &[&str]) -> Self {
        let is_code = |line: &&str| !line.is_empty() && !line.trim_start().starts_with("--");
        let lines = files.iter().flat_map(|file| file.lines()).filter(is_code);
        let lua = lines.collect::<Vec<_>>().join("\n");
        let sha1 = redis::Script::new(&lua).get_hash().to_owned();
        Self { lua, sha1, writes: files.ends_with(&[EPILOGUE]) }
    }
}

/// One call of a script, by its hash. Repeated as it is, it has the same effect.
#[derive(Debug, Clone)]
pub(super) struct ScriptCall {
    script: &'static Script,
    pub(super) command: Cmd,
}

impl ScriptCall {
    /// `key` is the key of Redis.
    pub(super) fn new(script: &'static Script, key: &str) -> Self {
        let mut command = Cmd::with_capacity(16, 320);
        command.arg("EVALSHA").arg(&script.sha1).arg(1).arg(key);
        Self { script, command }
    }

    pub(super) fn arg(mut self, arg: impl ToRedisArgs) -> Self {
        self.command.arg(arg);
        self
    }

    pub(super) fn writes(&self) -> bool {
        self.script.writes
    }

    /// Returns the call with the text of its script, for a server that does not know the hash.
    pub(super) fn by_text(&self) -> Cmd {
        let mut command = redis::cmd("EVAL");
        command.arg(&self.script.lua);
        for arg in self.command.args_iter().skip(2) {
            if let Arg::Simple(arg) = arg {
                command.arg(arg);
            }
        }
        command
    }
}
