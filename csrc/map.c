/*
 * map.c: the indexed map (picture in node_private.h).
 *
 * Hashing is SipHash under the process's secret, since keys come from outside. The hash of an entry
 * is not kept: when the index is made anew, every key is hashed again. That happens about once per
 * key on average, and saves 4 to 8 bytes for each entry.
 *
 * used <= 3/4 of the slots, dead entries included, so a probe always meets an empty slot.
 */
#include "hash.h"
#include "node_private.h"

#include <string.h>

#define MAP_BITS_MIN 3
#define MAP_BITS_MAX 31
#define MAP_CAP_MIN 4
#define MAP_USED_MIN 16 /* below this, dead entries wait until an insert needs the room */
#define NO_POSITION UINT32_MAX

static inline uint64_t used_max(unsigned bits) {
    return bits == 0 ? 0 : ((uint64_t)1 << bits) / 4 * 3;
}

static unsigned bits_for(uint64_t used) {
    unsigned bits = MAP_BITS_MIN;
    while (used_max(bits) < used) bits++;
    assert(bits <= MAP_BITS_MAX); /* a value of 1 GiB has at most 2^29 pairs */
    return bits;
}

static inline size_t index_bytes(unsigned bits) { return bits == 0 ? 0 : sizeof(uint32_t) << bits; }

int sk_map_key(sk_span step, unsigned step_number) {
    if (sk_mp_is_key(step.p, step.len)) return SK_OK;
    return sk_fail(SK_BAD_PATH,
                   "step %u: a map's key must be a scalar or an array of scalars, in its "
                   "shortest form; found byte 0x%02x",
                   step_number, *step.p);
}

/* ---- The index ------------------------------------------------------------------ */

static uint32_t find(const sk_map *map, sk_span key, uint64_t hash) {
    if (map->bits == 0) return NO_POSITION;
    const uint32_t mask = ((uint32_t)1 << map->bits) - 1;
    const uint32_t upper = (uint32_t)(hash >> 32) & ~mask;
    for (uint32_t at = (uint32_t)hash & mask; map->index[at] != 0; at = (at + 1) & mask) {
        if ((map->index[at] & ~mask) != upper) continue;
        uint32_t position = (map->index[at] & mask) - 1;
        sk_span other = sk_cell_span(&map->entries[position].key); /* dead: no bytes */
        if (other.len == key.len && memcmp(other.p, key.p, key.len) == 0) return position;
    }
    return NO_POSITION;
}

static inline bool is_dead(const sk_map *map, uint32_t word, uint32_t mask) {
    return map->entries[(word & mask) - 1].key.tag == SK_CELL_NONE;
}

/* The slot of a dead entry is as good as an empty one, and must be used again: otherwise a key that
 * is removed and put over and over would leave a row of dead slots, all in its own probe chain. */
static void index_add(sk_map *map, uint32_t position, uint64_t hash) {
    const uint32_t mask = ((uint32_t)1 << map->bits) - 1;
    uint32_t at = (uint32_t)hash & mask;
    while (map->index[at] != 0 && !is_dead(map, map->index[at], mask)) at = (at + 1) & mask;
    assert(position < mask);
    map->index[at] = ((uint32_t)(hash >> 32) & ~mask) | (position + 1);
}

static void index_rebuild(sk_map *map) {
    memset(map->index, 0, index_bytes(map->bits));
    for (uint32_t k = 0; k < map->used; k++) {
        sk_span key = sk_cell_span(&map->entries[k].key);
        if (key.len > 0) index_add(map, k, sk_secret_hash(key.p, key.len));
    }
}

sk_cell *sk_map_find(const sk_map *map, sk_span key) {
    uint32_t position = find(map, key, sk_secret_hash(key.p, key.len));
    return position == NO_POSITION ? NULL : &map->entries[position].value;
}

/* ---- Room ----------------------------------------------------------------------- */

/* Squeezes dead entries out. Positions change, so the caller must give the map a new version. */
static void compact(sk_map *map) {
    uint32_t live = 0;
    for (uint32_t k = 0; k < map->used; k++)
        if (map->entries[k].key.tag != SK_CELL_NONE) map->entries[live++] = map->entries[k];
    assert(live == map->live);
    map->used = live;
    index_rebuild(map);
}

/* Gives the arrays these sizes, which are not smaller than needed. Either both arrays change or, on
 * failure, neither. */
static int resize(sk_mem *mem, sk_map *map, uint32_t cap, unsigned bits) {
    assert(cap >= map->used && used_max(bits) >= map->used);
    uint32_t *index = NULL;
    if (bits != map->bits) {
        index = sk_alloc(mem, index_bytes(bits));
        if (index == NULL) return sk_alloc_status();
    }
    if (cap != map->cap) {
        sk_entry *entries =
            sk_realloc(mem, map->entries, map->cap * sizeof(sk_entry), cap * sizeof(sk_entry));
        if (entries == NULL) {
            sk_free(mem, index, index_bytes(bits));
            return sk_alloc_status();
        }
        map->entries = entries;
        map->cap = cap;
    }
    if (index != NULL) {
        sk_free(mem, map->index, index_bytes(map->bits));
        map->index = index;
        map->bits = (uint8_t)bits;
        index_rebuild(map);
    }
    return SK_OK;
}

/* Makes room for `more` new entries, which the caller must then add, because dead entries may be
 * squeezed out here. */
static int reserve(sk_mem *mem, sk_map *map, uint32_t more) {
    uint64_t need = (uint64_t)map->used + more;
    if (need <= map->cap && need <= used_max(map->bits)) return SK_OK;
    uint32_t dead = map->used - map->live;
    uint64_t compacted = (uint64_t)map->live + more;
    if (dead >= map->used / 4 && dead > 0 && compacted <= map->cap &&
        compacted <= used_max(map->bits)) {
        compact(map);
        return SK_OK;
    }
    uint64_t cap = map->cap, wish = (uint64_t)map->used + map->used / 2;
    if (cap < need) cap = need > wish ? need : wish;
    if (cap < MAP_CAP_MIN) cap = MAP_CAP_MIN;
    unsigned bits = need <= used_max(map->bits) ? map->bits : bits_for(need);
    return resize(mem, map, (uint32_t)cap, bits);
}

static void arrays_release(sk_mem *mem, sk_map *map) {
    sk_free(mem, map->entries, map->cap * sizeof(sk_entry));
    sk_free(mem, map->index, index_bytes(map->bits));
    map->entries = NULL;
    map->index = NULL;
    map->live = map->used = map->cap = 0;
    map->bits = 0;
}

/* Squeezes dead entries out when they are the majority, and gives back memory if far less is
 * needed. Cannot fail: it may keep the memory. */
static void trim(sk_mem *mem, sk_map *map) {
    if (map->used < MAP_USED_MIN || map->used - map->live <= map->live) return;
    assert(map->live > 0); /* or the majority would have been dead before */
    compact(map);
    uint32_t cap = map->live + map->live / 2;
    unsigned bits = bits_for(cap);
    if (bits < map->bits) (void)resize(mem, map, cap, bits);
}

/* ---- Making and freeing ---------------------------------------------------------- */

static void entries_free(sk_mem *mem, sk_map *map) {
    for (uint32_t k = 0; k < map->used; k++) {
        sk_cell_free(mem, &map->entries[k].key);
        sk_cell_free(mem, &map->entries[k].value);
    }
}

void sk_map_free(sk_mem *mem, sk_map *map) {
    entries_free(mem, map);
    arrays_release(mem, map);
    sk_free(mem, map, sizeof *map);
}

/* Adds an entry whose key is not there; room was reserved. Then the map owns the cells. */
static void add(sk_map *map, const sk_entry *entry, uint64_t hash) {
    assert(map->used < map->cap && map->used < used_max(map->bits));
    map->entries[map->used] = *entry;
    index_add(map, map->used, hash);
    map->used++;
    map->live++;
    map->body += sk_cell_size(&entry->key) + sk_cell_size(&entry->value);
}

static int entry_make(sk_mem *mem, uint64_t *seq, sk_span key, sk_span value, sk_entry *entry) {
    int status = sk_cell_make_key(mem, key, &entry->key);
    if (status != SK_OK) return status;
    status = sk_cell_make(mem, seq, value, &entry->value);
    if (status != SK_OK) sk_cell_free(mem, &entry->key);
    return status;
}

static void entry_free(sk_mem *mem, sk_entry *entry) {
    sk_cell_free(mem, &entry->key);
    sk_cell_free(mem, &entry->value);
}

static int add_all(sk_mem *mem, uint64_t *seq, sk_map *map, const uint8_t *p, uint32_t pairs) {
    for (uint32_t k = 0; k < pairs; k++) {
        const uint8_t *value = sk_mp_next(p), *next = sk_mp_next(value);
        sk_span key = {p, (size_t)(value - p)};
        uint64_t hash = sk_secret_hash(key.p, key.len);
        if (find(map, key, hash) != NO_POSITION)
            return sk_fail(SK_BAD_VALUE, "a map of %u pairs has the key of pair %u twice", pairs,
                           k);
        sk_entry entry;
        int status = entry_make(mem, seq, key, (sk_span){value, (size_t)(next - value)}, &entry);
        if (status != SK_OK) return status;
        add(map, &entry, hash);
        p = next;
    }
    return SK_OK;
}

int sk_map_make(sk_mem *mem, uint64_t *seq, sk_span pairs, sk_obj **obj) {
    sk_mp_head head = sk_mp_head_of(pairs.p);
    assert(head.type == SK_MP_MAP);
    sk_map *map = sk_alloc(mem, sizeof *map);
    if (map == NULL) return sk_alloc_status();
    *map = (sk_map){.obj = {SK_OBJ_MAP}, .version = ++*seq};
    int status = head.count > 0 ? reserve(mem, map, head.count) : SK_OK;
    if (status == SK_OK) status = add_all(mem, seq, map, pairs.p + head.head_len, head.count);
    if (status != SK_OK) {
        sk_map_free(mem, map);
        return status;
    }
    *obj = &map->obj;
    return SK_OK;
}

/* ---- Writes ----------------------------------------------------------------------- */

static int64_t head_delta(uint64_t was, uint64_t is) {
    return (int64_t)sk_mp_head_len(is) - (int64_t)sk_mp_head_len(was);
}

static void body_grow(sk_map *map, int64_t delta) {
    map->body = (uint64_t)((int64_t)map->body + delta);
}

/* Frees the value of an entry and puts another in its place. */
static void replace(sk_mem *mem, sk_map *map, uint32_t position, const sk_cell *value) {
    sk_cell *old = &map->entries[position].value;
    body_grow(map, (int64_t)sk_cell_size(value) - (int64_t)sk_cell_size(old));
    sk_cell_free(mem, old);
    *old = *value;
}

static int put_over(sk_edit *e, sk_map *map, uint32_t position, sk_span value) {
    sk_cell cell;
    int status = sk_cell_make(e->mem, e->seq, value, &cell);
    if (status != SK_OK) return status;
    const sk_cell *old = &map->entries[position].value;
    int64_t delta = (int64_t)sk_cell_size(&cell) - (int64_t)sk_cell_size(old);
    status = sk_edit_grow(e, delta);
    if (status != SK_OK) {
        sk_cell_free(e->mem, &cell);
        return status;
    }
    replace(e->mem, map, position, &cell);
    e->delta = delta;
    return SK_OK;
}

int sk_map_put(sk_edit *e, sk_map *map, sk_span key, sk_span value) {
    uint64_t hash = sk_secret_hash(key.p, key.len);
    uint32_t position = find(map, key, hash);
    if (position != NO_POSITION) return put_over(e, map, position, value);
    sk_entry entry;
    int status = entry_make(e->mem, e->seq, key, value, &entry);
    if (status != SK_OK) return status;
    int64_t delta = (int64_t)(sk_cell_size(&entry.key) + sk_cell_size(&entry.value)) +
                    head_delta(map->live, (uint64_t)map->live + 1);
    status = sk_edit_grow(e, delta);
    if (status == SK_OK) status = reserve(e->mem, map, 1);
    if (status != SK_OK) {
        entry_free(e->mem, &entry);
        return status;
    }
    add(map, &entry, hash);
    map->version = ++*e->seq;
    e->delta = delta;
    return SK_OK;
}

static int remove_key(sk_edit *e, sk_map *map, sk_span key) {
    uint32_t position = find(map, key, sk_secret_hash(key.p, key.len));
    if (position == NO_POSITION) return SK_MISSING;
    sk_entry *entry = &map->entries[position];
    if (e->op == SK_W_TAKE) {
        int status = sk_cell_copy_out(e, &entry->value);
        if (status != SK_OK) return status;
    }
    int64_t size = (int64_t)(sk_cell_size(&entry->key) + sk_cell_size(&entry->value));
    entry_free(e->mem, entry);
    entry->key.tag = entry->value.tag = SK_CELL_NONE;
    body_grow(map, -size);
    e->delta = head_delta(map->live, map->live - 1) - size;
    map->live--;
    map->version = ++*e->seq;
    trim(e->mem, map);
    return SK_OK;
}

static int clear(sk_edit *e, sk_map *map) {
    if (map->live == 0) return SK_OK;
    e->delta = head_delta(map->live, 0) - (int64_t)map->body;
    entries_free(e->mem, map);
    arrays_release(e->mem, map);
    map->body = 0;
    map->version = ++*e->seq;
    return SK_OK;
}

/* How many entries of `other` are new to the map, and by how many bytes merging would grow it. */
static uint32_t measure_merge(const sk_map *map, const sk_map *other, int64_t *grown) {
    uint32_t added = 0;
    *grown = 0;
    for (uint32_t k = 0; k < other->used; k++) {
        const sk_entry *entry = &other->entries[k];
        const sk_cell *old = sk_map_find(map, sk_cell_span(&entry->key));
        *grown += (int64_t)sk_cell_size(&entry->value);
        *grown += old != NULL ? -(int64_t)sk_cell_size(old) : (int64_t)sk_cell_size(&entry->key);
        added += old == NULL;
    }
    *grown += head_delta(map->live, (uint64_t)map->live + added);
    return added;
}

/* All or nothing: first the arg becomes a map of its own. That finds equal keys in it, and does
 * everything that can fail. Then its cells are moved over. */
static int merge(sk_edit *e, sk_map *map) {
    sk_obj *obj;
    int status = sk_map_make(e->mem, e->seq, e->arg, &obj);
    if (status != SK_OK) return status;
    sk_map *other = (sk_map *)obj;
    int64_t delta;
    uint32_t added = measure_merge(map, other, &delta);
    status = sk_edit_grow(e, delta);
    if (status == SK_OK && added > 0) status = reserve(e->mem, map, added);
    if (status != SK_OK) {
        sk_map_free(e->mem, other);
        return status;
    }
    for (uint32_t k = 0; k < other->used; k++) {
        sk_entry *entry = &other->entries[k];
        sk_span key = sk_cell_span(&entry->key);
        uint64_t hash = sk_secret_hash(key.p, key.len);
        uint32_t position = find(map, key, hash);
        if (position == NO_POSITION) {
            add(map, entry, hash);
        } else {
            replace(e->mem, map, position, &entry->value);
            sk_cell_free(e->mem, &entry->key);
        }
    }
    other->used = 0; /* its cells have a new owner, or are gone */
    sk_map_free(e->mem, other);
    if (added > 0) map->version = ++*e->seq;
    e->delta = delta;
    return SK_OK;
}

int sk_map_apply(sk_edit *e, sk_map *map) {
    int status = SK_OK;
    switch (e->op) {
    case SK_W_SET:
    case SK_W_DELETE:
        status = sk_map_key(e->name, e->depth);
        if (status != SK_OK) return status;
        return e->op == SK_W_SET ? sk_map_put(e, map, e->name, e->arg)
                                 : remove_key(e, map, e->name);
    case SK_W_TAKE:
        return remove_key(e, map, e->name);
    case SK_W_UPDATE:
        return merge(e, map);
    case SK_W_CLEAR:
        return clear(e, map);
    default:
        return sk_wrong_container(e, "a map");
    }
}
