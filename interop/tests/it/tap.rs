//! A tap between a client and a server: records the client's messages, and can change the server's.

use std::io::{BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

use serde_json::Value;

/// The messages that a client has sent.
#[derive(Debug, Clone, Default)]
pub(crate) struct Messages(Arc<Mutex<Vec<Value>>>);

impl Messages {
    /// The params of every request with this method.
    pub(crate) fn of(&self, method: &str) -> Vec<Value> {
        let all = self.0.lock().unwrap();
        all.iter().filter(|it| it["method"] == method).map(|it| it["params"].clone()).collect()
    }

    /// The results that the client has answered the server's requests with.
    pub(crate) fn answers(&self) -> Vec<Value> {
        let all = self.0.lock().unwrap();
        all.iter().filter(|it| it.get("method").is_none()).map(|it| it["result"].clone()).collect()
    }
}

/// A listener in front of a server.
#[derive(Debug)]
pub(crate) struct Tap {
    pub url: String,
    pub messages: Messages,
}

impl Tap {
    /// Starts a tap in front of the server at `url`; clients do not see the capability `without`.
    pub(crate) fn start(url: &str, without: Option<&str>) -> Self {
        Self::changing(url, hide(without))
    }

    /// Starts a tap in front of the server at `url`; clients see its messages as `change` makes them.
    pub(crate) fn changing(
        url: &str,
        change: impl Fn(&str) -> String + Send + Sync + 'static,
    ) -> Self {
        let server = url.strip_prefix("ws://").unwrap().trim_end_matches('/').to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("ws://{}", listener.local_addr().unwrap());
        let messages = Messages::default();
        let recorded = messages.clone();
        let change = Arc::new(change);
        thread::spawn(move || {
            for client in listener.incoming() {
                let (client, server) = (client.unwrap(), TcpStream::connect(&server).unwrap());
                let (from, to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                let (recorded, change) = (recorded.clone(), change.clone());
                thread::spawn(move || {
                    let _ = relay(&from, &to, |text| {
                        recorded.0.lock().unwrap().push(serde_json::from_slice(text).unwrap());
                        None
                    });
                    let _ = to.shutdown(std::net::Shutdown::Both);
                });
                thread::spawn(move || {
                    let _ = relay(&server, &client, |text| {
                        let text = String::from_utf8_lossy(text);
                        let changed = change(&text);
                        (changed != text).then(|| changed.into_bytes())
                    });
                    let _ = client.shutdown(std::net::Shutdown::Both);
                });
            }
        });
        Self { url, messages }
    }
}

/// Turns a capability off in a server's messages.
pub(crate) fn hide(capability: Option<&str>) -> impl Fn(&str) -> String + Send + Sync + use<> {
    let switch = capability.map(|name| [true, false].map(|bit| format!("\"{name}\":{bit}")));
    move |text| match &switch {
        Some([on, off]) => text.replace(on, off),
        None => text.to_owned(),
    }
}

/// Copies one direction, from the upgrade on. `change` sees every message and may replace it.
fn relay(
    from: &TcpStream,
    mut to: &TcpStream,
    mut change: impl FnMut(&[u8]) -> Option<Vec<u8>>,
) -> std::io::Result<()> {
    let mut from = BufReader::new(from);
    let mut upgrade = Vec::new();
    while !upgrade.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        from.read_exact(&mut byte)?;
        upgrade.push(byte[0]);
    }
    to.write_all(&upgrade)?;
    let (mut frames, mut message) = (Vec::new(), Vec::new());
    loop {
        let (head, payload, raw) = frame(&mut from)?;
        // Pings, pongs and closes may come between the frames of a message.
        if head & 0x0f >= 8 {
            to.write_all(&raw)?;
            continue;
        }
        message.extend(payload);
        frames.extend(raw);
        if head & 0x80 != 0 {
            match change(&message) {
                Some(changed) => to.write_all(&unmasked(&changed))?,
                None => to.write_all(&frames)?,
            }
            message.clear();
            frames.clear();
        }
    }
}

/// One frame: its first byte, its payload without the mask, and all of its bytes.
fn frame(from: &mut impl Read) -> std::io::Result<(u8, Vec<u8>, Vec<u8>)> {
    let mut raw = vec![0; 2];
    from.read_exact(&mut raw)?;
    let mut more = |raw: &mut Vec<u8>, count: usize| -> std::io::Result<Vec<u8>> {
        let mut bytes = vec![0; count];
        from.read_exact(&mut bytes)?;
        raw.extend(&bytes);
        Ok(bytes)
    };
    let (head, second) = (raw[0], raw[1]);
    let extended = match second & 0x7f {
        126 => 2,
        127 => 8,
        _ => 0,
    };
    let length = match more(&mut raw, extended)? {
        none if none.is_empty() => usize::from(second & 0x7f),
        bytes => bytes.iter().fold(0, |length, byte| length << 8 | usize::from(*byte)),
    };
    let mask = more(&mut raw, if second & 0x80 != 0 { 4 } else { 0 })?;
    let mut payload = more(&mut raw, length)?;
    if !mask.is_empty() {
        payload.iter_mut().zip(mask.iter().cycle()).for_each(|(byte, mask)| *byte ^= mask);
    }
    Ok((head, payload, raw))
}

/// A text message of a server in one frame.
fn unmasked(text: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0x81, 127];
    bytes.extend((text.len() as u64).to_be_bytes());
    bytes.extend(text);
    bytes
}
