"""A thousand everyday words for names, invented tools and values; names of people and places for values.

None of the words occurs in the unseen tools of `unseen`, and no name is a value of a natural request: tests compare them.

In a small vocabulary most of them are two or three tokens. Names made of a few common one-token words alone teach a model those words by heart,
and it then copies nothing else (LOG.md).
"""

WORDS = """
accept acorn admire adopt adult advice afternoon agent agree airport alarm album allow almond amber amuse anchor angel ankle announce
antenna apple apply apron arch arena argue arm arrange arrive arrow artist ash attend attic august autumn avenue avoid award baby badge
bag bake bakery balance balcony bamboo banana band bandage bank banner barn barrel basement basin basket bath bathe beach beam bean bear
beard bee beef beg begin behave bell belong belt bench bend berry bill bird biscuit blame blend bless blink blouse boat boil bolt bone
bonnet boot border borrow boulder bounce boundary bow bowl bracelet branch brass bread breakfast breathe breed breeze brick bridge bring
broom brother brush bubble bucket budget buffalo bulb bundle burger burn bury bus bush butcher butter button cabbage cabin cactus cage
cake calculate calf camel camp canal cancel candle candy canoe canvas captain carbon carpet carriage carrot cart carve castle cattle cave
celebrate cellar cement cereal chair chalk chamber change channel chapel chapter charcoal charge chase cheese cherry chest chew chicken
chief chimney chin chocolate church circus citizen clap clay clerk cliff climate climb cloak clock cloth cloud clover coal coast coat
cobweb coconut coffee coffin coin collar collect college comb compare complain confess confuse connect consider contain continue control
cook copper copy coral cork corn corner cottage cotton couch cough council counter country couple court cousin cow cradle crane crash
crate cream creek cricket crow crowd crown cruise crush cry crystal cupboard cure curl curtain curve cushion customs cycle dairy damage
dance dancer danger dare daughter dawn deceive decide deck decorate deer deliver dentist deny depend deposit describe desert deserve
dessert destroy detect develop diamond diary dig dinner disagree discover dish ditch divide dock doctor dog doll dolphin donkey double
doubt drag dragon drain drama drawer dream dress drip driver drop drown drum duck dust eagle earn easel echo editor educate effort elbow
elephant elevator empire employ encourage engine enjoy entertain envelope errand escape estate evidence exam examine excuse exercise
exhibit exist expand expect explain explode extend fabric factory fail fairy falcon famine farmer fasten faucet fax feather ferry festival
fetch fever fiddle fig fight fill finger firm fish flag flame flannel flask fleet flesh flight flock flood flow flower flute fly fog fold
folder follow fool force forest forget forgive fork fortune found fountain fox fragment freeze freezer fridge frighten frog frost fruit
fry fuel funnel fur furnace gallery garage garden garlic garment gate gather gaze gem giant ginger giraffe glacier glass glove glow glue
goat gold goose gown grab grain grape grass grate grave gravel greet grill grin grip groan grocery guard guide guitar gulf gum gym habit
hail hair hammer hammock hamster handle hang happen harbor harm harp harvest hat hate haunt hawk hay hazel heal heap hearth heat heaven
heel helmet hen herb herd hero hill hinge hive hobby hole honey hood hook hope horn hospital hotel hover hug hum humor hunt hunter hurry
husband hut ice icing identify igloo ignore imagine impress improve increase infant influence inform inject injure ink inn insect instruct
intend interrupt introduce invent invite invoice iron irritate island itch ivory ivy jacket jaguar jail jam jar jaw jeans jelly jet jewel
joke journal journey judge juggle juice jungle jury kangaroo kennel kettle kick kidney kill kingdom kiosk kiss kitchen kite kitten knee
kneel knife knob knock knot label labor lace ladder lake lamb lamp lane lantern laugh laundry lawn leaf learn leather lecture ledge lemon
lend leopard lesson lettuce lick lid lie lily limb lime linen lion lip liquid listen live lizard loaf lobby lobster lock locker loom lorry
lose lotion lounge luggage lumber lunch lung magnet maid mailbox mammal manage mango mantle maple marble march margin marry marsh mast mat
mattress meadow meal medal medicine melody melon melt member mend mermaid metal meteor midnight milk mill mineral mint mirror miss mist
mitten moan monkey monster monument moose mosque moth motor mountain mourn mouse mouth mud muffin mug mule multiply murder muscle museum
mushroom musician mustard nail napkin nation neck necklace neighbor nephew nerve nest net nickel niece nod noodle noon nose notebook
notice novel nurse nut nylon oak oar oasis oats obey object obtain occur ocean octopus offend offer olive onion opera orange orchard
orchid organ ostrich otter oven overflow owe owl owner oyster package paddle padlock palace palm pan panda panel pantry parade pardon
parent parrot partner pass passport pasta paste pat patient pause pavement paw peach peacock peak peanut pearl pebble peck peel peep pen
pencil penguin pepper perform perfume permit petal petrol pickle picnic pie pigeon pill pillow pilot pinch pine pipe pirate pistol plaster
plastic plate platform please plum plumber pocket poem poet poke police polish pond pony poppy porch porridge port portrait possess potato
pottery powder practise prairie praise pray prayer preach prefer prepare present preserve pretend prevent prick priest prince prison prize
produce profit promise protect provide puddle pumpkin punch puncture punish puppet puppy purse push puzzle pyramid quarrel queen question
quilt quiver rabbit raccoon race racket radar radio raft rail rain raisin ranch raven razor realise receipt receive recognise reduce
refuge refuse region regret reign reject rejoice relax release relish rely remain remedy remember remind remove rent repair repeat replace
reply reptile request rescue retire reward rhyme ribbon rifle ring rinse risk river rob robe robin robot rocket rod roof root rope rot rub
rubber rug ruin ruler rumor rush sack saddle sailor salad salmon salt sand sandal satin sauce saucer sausage savior saw scarf school
scissors scooter scout screw sea seal season secret servant sewer shadow shark shed sheep shell shelter shepherd shield shirt shoe
shoulder shovel shower shrimp silk silver singer sink siren sister skate ski skin skirt skull sled sleeve slipper slope smoke snack snail
snake snow soap soccer sock sofa soil soldier son soup spark sparrow spear spider spinach spine sponge spoon spring squirrel stable
stadium staff stair stamp statue steak steam steel stem stick stomach stone stool stove stranger straw student studio sugar suitcase
summer sunset supper surgeon swamp swan sweater swing sword syrup tablet tail tailor tank tape tavern taxi tea teacher tear temple tenant
tennis tent terrace theater thorn thread throat throne thumb ticket tide tiger timber toast tobacco toe tomato tomb tongue tooth torch
tortoise tower toy tractor traffic trail train trap treasure tree tribe trolley trophy trousers truck trumpet trunk tulip tunnel turkey
turnip turtle tutor twig umbrella uncle uniform universe urn vacuum valley valve vampire van vase vault vegetable veil velvet vessel vest
victim village vine vinegar violet violin virus visitor volcano vulture wagon waist waiter walnut walrus wardrobe warehouse wasp waterfall
wave wax weapon web wedding weed week whale wheat whip whistle widow wife willow window wine wing winter witch wizard wolf woman wood
worker worm wrist writer yacht yard yogurt yolk zebra zipper zone zoo""".split()

NAMES = """
Aaron Abel Ada Adam Agnes Ahmed Aisha Alan Albert Alex Alice Amara Amelia Amir Ana Andrea Anna Anton Arthur Astrid Ava Barbara Ben
Bianca Boris Brian Bruno Carla Carlos Carmen Cecilia Charlie Chen Chloe Claire Clara Colin Connor Dana Daniel Daria David Deepak Diana Diego
Dmitri Dora Edgar Elena Eli Elif Elsa Emil Emre Erik Esther Eva Farah Felix Fiona Florian Frank Freya Gabriel George Gloria Grace Greta
Hamid Hana Harold Hassan Helen Henry Hugo Ibrahim Ida Igor Ines Ingrid Irene Isaac Ivan Jack Jakob James Jamila Jane Jasmin Javier Joan
Johan Jonas Jorge Joseph Julia Kamal Karen Karim Karl Katya Keiko Kenji Kevin Lara Lars Laura Lea Leo Leon Lena Liam Lin Linda Lucas Lucia
Luis Luna Maria Marco Margot Mark Marta Martin Mateo Maya Mehmet Mei Mia Michael Miguel Milan Mina Mohammed Monica Nadia Naomi Natasha Nico
Nils Nina Noah Nora Olaf Olga Oliver Omar Oscar Otto Pablo Patricia Paul Pedro Petra Philip Rafael Rashid Rebecca Ricardo Rita Robert Rosa
Ruth Samir Samuel Sandra Sara Sergei Simon Sofia Stefan Susan Tariq Teresa Theo Thomas Tim Tomas Ursula Valentina Vera Victor Wei Yara Yuki
Yusuf Zara Zoe""".split()

PLACES = """
Aachen Aleppo Algiers Amsterdam Ankara Antwerp Athens Atlanta Auckland Baghdad Baku Bali Bangkok Barcelona Basel Beirut Belfast
Belgrade Bergen Bilbao Bogota Bombay Bordeaux Boston Bremen Brisbane Bristol Brno Brussels Bucharest Budapest Cairo Calgary Canberra Caracas
Cardiff Casablanca Chicago Cologne Copenhagen Cork Dakar Dallas Damascus Delhi Denver Detroit Dhaka Doha Dresden Dubai Dublin Durban
Edinburgh Florence Frankfurt Geneva Genoa Ghent Glasgow Granada Graz Hamburg Hanoi Havana Helsinki Houston Istanbul Izmir Jakarta
Jerusalem Kabul Kampala Karachi Kiev Kingston Krakow Kyoto Lagos Leeds Leipzig Lille Lima Liverpool Ljubljana Lodz Lucerne Lusaka
Lyon Madrid Malaga Malmo Manchester Manila Marseille Melbourne Memphis Miami Milano Minsk Montreal Moscow Mumbai Munich Nairobi Nantes
Naples Odessa Osaka Ottawa Oxford Palermo Perth Phoenix Porto Prague Quito Reykjavik Riga Rome Rotterdam Salzburg Santiago Sarajevo
Seattle Seoul Seville Shanghai Singapore Stockholm Sydney Taipei Tallinn Tampere Tehran Tokyo Toronto Toulouse Trieste Tripoli Tunis
Turin Utrecht Valencia Vancouver Venice Vienna Vilnius Warsaw Winnipeg Wuhan Zagreb Zurich""".split()
