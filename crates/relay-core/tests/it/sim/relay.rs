//! The relay's part of a schedule: what becomes of a frame on its way.

use bytes::Bytes;
use codex_exec_relay_core::*;

use crate::util::Rng;

/// Chances in a hundred, per frame.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Faults {
    pub loss: u64,
    pub repeat: u64,
    pub disorder: u64,
    pub tamper: u64,
    /// Longest delay of a frame, in ms.
    pub delay: u64,
}

/// Takes the acknowledgements out of a frame, or the whole frame if it is of a kind that
/// deployed peers never send.
pub(crate) fn without_acks(frame: &Bytes) -> Option<Bytes> {
    let mut decoded = Frame::decode(frame.clone(), &FrameLimits::default()).unwrap();
    let sent_by_deployed = match &decoded.body {
        Body::Ack | Body::Heartbeat => false,
        Body::Resume { next_seq } => *next_seq == 0,
        Body::Data(_) | Body::Reset { .. } | Body::Handshake { .. } => true,
    };
    (decoded.ack, decoded.ack_bits) = (0, 0);
    sent_by_deployed.then(|| decoded.encode())
}

/// A lie about one stream: `frame` with something changed, or something made up.
pub(crate) fn tampered(frame: &Bytes, earlier: &[Bytes], rng: &mut Rng) -> Bytes {
    let mut decoded = Frame::decode(frame.clone(), &FrameLimits::default()).unwrap();
    match rng.below(9) {
        0 => {
            let mut bytes = frame.to_vec();
            let at = rng.below(bytes.len() as u64) as usize;
            bytes[at] ^= 1 << rng.below(8);
            return bytes.into();
        }
        1 => return frame.slice(..rng.below(frame.len() as u64) as usize),
        2 => decoded.ack = rng.next() as u32,
        3 => decoded.ack_bits = rng.next() as u32,
        4 => {
            if let Body::Data(data) = &mut decoded.body {
                data.seq = data.seq.wrapping_add(rng.below(70) as u32);
            }
        }
        5 => {
            if let Body::Data(data) = &mut decoded.body {
                let mut payload = data.payload.to_vec();
                let at = rng.below(payload.len() as u64) as usize;
                payload[at] ^= 1 << rng.below(8);
                data.payload = payload.into();
            }
        }
        6 => return earlier[rng.below(earlier.len() as u64) as usize].clone(),
        7 => decoded = invented(decoded.stream_id, rng),
        _ => return Bytes::from(vec![rng.next() as u8; rng.below(64) as usize]),
    }
    decoded.encode()
}

/// Any frame for this stream.
pub(crate) fn invented(stream: StreamId, rng: &mut Rng) -> Frame {
    let payload = |rng: &mut Rng| {
        let mut bytes = vec![0; 1 + rng.below(5000) as usize];
        rng.fill(&mut bytes).unwrap();
        Bytes::from(bytes)
    };
    let body = match rng.below(6) {
        0 => Body::Data(Data {
            seq: rng.below(100) as u32,
            segment_index: 0,
            segment_count: 1 + rng.below(2) as u32,
            payload: payload(rng),
        }),
        1 => Body::Ack,
        2 => Body::Resume { next_seq: rng.below(10) as u32 },
        3 if rng.chance(10) => Body::Reset { reason: "because".into() },
        4 => Body::Handshake { payload: payload(rng) },
        _ => Body::Heartbeat,
    };
    let ack = if rng.chance(50) { 0 } else { rng.below(20) as u32 };
    Frame::new(stream, ack, 0, body)
}
