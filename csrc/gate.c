/*
 * gate.c: for leaves on their way to another process: whether calls about their keys are let in.
 *
 *              sk_leaf.residency   a call about a key   what is here
 *   open       sk_residency        does its work        residency says
 *   shut       SK_LEAF_SHUT        SK_NOT_OWNED         kept says; it is read out, and completed
 *   expected   SK_LEAF_EXPECTED    SK_UNKNOWN           nothing
 *
 * A gate changes under the leaf's lock, taken for writing. So when sk_leaf_gate returns, every call
 * that began before has ended or will find the gate as it is now. A snapshot that was opened before
 * has the leaf as it was; one that is opened later sees the leaf through the new gate.
 */
#include "store.h"

int sk_leaf_refuse(const sk_leaf *leaf, uint32_t leaf_no) {
    assert(leaf->residency >= SK_AWAY);
    if (leaf->residency == SK_LEAF_EXPECTED) return SK_UNKNOWN;
    if (leaf->residency == SK_AWAY) return sk_fail(SK_NOT_OWNED, "leaf %u is away", leaf_no);
    return sk_fail(SK_NOT_OWNED,
                   "leaf %u is being handed over to another process: route the key to its new "
                   "owner",
                   leaf_no);
}

static int gate_of(const sk_leaf *leaf) {
    return leaf->residency == SK_LEAF_SHUT       ? SK_GATE_SHUT
           : leaf->residency == SK_LEAF_EXPECTED ? SK_GATE_EXPECTED
                                                 : SK_GATE_OPEN;
}

/* SK_OK if the gate of a locked leaf may be set to `gate`. */
static int check_gate(const sk_leaf *leaf, uint32_t leaf_no, int gate) {
    if (gate == SK_GATE_SHUT && leaf->residency == SK_AWAY) return sk_leaf_refuse(leaf, leaf_no);
    if (gate == SK_GATE_EXPECTED && leaf->residency != SK_AWAY && sk_leaf_held(leaf) != SK_ABSENT)
        return sk_fail(SK_BAD_ARGUMENT,
                       "leaf %u cannot be expected: it is here, or part of it; mark it absent "
                       "first",
                       leaf_no);
    return SK_OK;
}

static void set_gate(sk_leaf *leaf, int gate) {
    if (gate == gate_of(leaf)) return;
    if (gate == SK_GATE_SHUT) {
        leaf->kept = leaf->residency;
        leaf->residency = SK_LEAF_SHUT;
    } else if (gate == SK_GATE_EXPECTED) {
        leaf->residency = SK_LEAF_EXPECTED;
    } else if (leaf->residency == SK_LEAF_SHUT) {
        leaf->residency = leaf->kept; /* expected again, if it was and nothing has come */
    } else {
        leaf->residency = SK_ABSENT;
    }
}

int sk_leaf_gate(sk_store *store, uint32_t from, uint32_t to, int gate) {
    int status = sk_leaf_range_check(store, from, to);
    if (status != SK_OK) return status;
    if (gate < SK_GATE_OPEN || gate > SK_GATE_EXPECTED)
        return sk_fail(SK_BAD_ARGUMENT, "there is no gate %d", gate);
    uint32_t epoch;
    if ((status = sk_leaves_lock_write(store, from, to, &epoch)) != SK_OK) return status;
    for (uint32_t i = from; i < to && status == SK_OK; i++)
        status = check_gate(&store->leaves[i], i, gate);
    for (uint32_t i = from; i < to && status == SK_OK; i++) set_gate(&store->leaves[i], gate);
    sk_leaves_unlock(store, from, to);
    return status;
}

int sk_leaf_gate_of(sk_store *store, uint32_t leaf_no) {
    if (leaf_no >= store->leaf_count) return -sk_leaf_range_check(store, leaf_no, leaf_no + 1);
    sk_leaf_lock(&store->leaves[leaf_no]);
    int gate = gate_of(&store->leaves[leaf_no]);
    sk_leaf_unlock(&store->leaves[leaf_no]);
    return gate;
}
